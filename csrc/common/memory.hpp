// Aligned memory, and a cache of memory blocks. A training step uses a hundred megabytes or more; without the cache the system would map
// and clear all pages again at each step.
#pragma once

#include <cstddef>

namespace egru {

constexpr std::size_t cache_capacity = std::size_t(1) << 30;  // bytes

struct Block {
    void* address;
    std::size_t size;  // at least the requested size
};

// Memory aligned to `unit`, a power of two that divides `bytes`, with huge pages if `huge`; null if there is none left.
void* allocate_aligned(std::size_t unit, std::size_t bytes, bool huge);
void free_aligned(void* address);

Block acquire_block(std::size_t bytes);  // aligned to a cache line; throws std::bad_alloc
void return_block(Block block);          // to the cache
std::size_t cached_memory();             // bytes in the cache
void release_memory();                   // free all blocks in the cache

}  // namespace egru
