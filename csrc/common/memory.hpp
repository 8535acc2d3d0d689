// Blocks of memory that are kept when they are given back, for the next call of the same size. A training step fills a
// hundred megabytes and more; fresh from the system, every page of them would be cleared and mapped again at each step.
#pragma once

#include <cstddef>

namespace egru {

constexpr std::size_t memory_kept_most = std::size_t(1) << 30;  // bytes in blocks nobody holds

struct Block {
    void* address;
    std::size_t size;  // at least what was asked for
};

Block take_memory(std::size_t bytes);  // on a cache line; throws std::bad_alloc
void give_memory(Block block);
std::size_t memory_kept();
void release_memory();  // all blocks nobody holds, to the system

}  // namespace egru
