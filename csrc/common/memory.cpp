#include "common/memory.hpp"

#include <cstdint>
#include <cstdlib>
#include <mutex>
#include <new>
#include <vector>

#if defined(__linux__)
#include <sys/mman.h>
#elif defined(_WIN32)
#include <malloc.h>
#endif

namespace egru {
namespace {

constexpr std::size_t line = 64, huge_page = std::size_t(2) << 20;

std::mutex& guard() {
    static auto* mutex = new std::mutex;  // never destroyed: tensors may outlive this library's statics
    return *mutex;
}
std::vector<Block>& cache() {  // oldest first
    static auto* blocks = new std::vector<Block>;
    return *blocks;
}

std::size_t alignment(std::size_t bytes) { return bytes >= 2 * huge_page ? huge_page : line; }

std::size_t round_up(std::size_t bytes) {
    const std::size_t unit = alignment(bytes);
    return (bytes + unit - 1) / unit * unit;
}

Block allocate(std::size_t bytes) {
    const std::size_t unit = alignment(bytes), size = round_up(bytes);
    void* address = allocate_aligned(unit, size, unit == huge_page);
    if (address == nullptr) throw std::bad_alloc();
    return {address, size};
}

std::size_t total() {
    std::size_t sum = 0;
    for (const Block& block : cache()) sum += block.size;
    return sum;
}

}  // namespace

void* allocate_aligned(std::size_t unit, std::size_t bytes, [[maybe_unused]] bool huge) {
#ifdef _WIN32
    return _aligned_malloc(bytes, unit);
#else
    void* address = std::aligned_alloc(unit, bytes);
#ifdef MADV_HUGEPAGE
    if (huge && address != nullptr) madvise(address, bytes, MADV_HUGEPAGE);
#endif
    return address;
#endif
}

void free_aligned(void* address) {
#ifdef _WIN32
    _aligned_free(address);
#else
    std::free(address);
#endif
}

Block acquire_block(std::size_t bytes) {
    {
        std::lock_guard<std::mutex> lock(guard());
        auto& blocks = cache();
        auto best = blocks.end();
        const std::size_t largest = round_up(bytes) + bytes / 4;
        for (auto block = blocks.begin(); block != blocks.end(); ++block)
            if (block->size >= bytes && block->size <= largest &&
                (best == blocks.end() || block->size < best->size))
                best = block;
        if (best != blocks.end()) {
            const Block block = *best;
            blocks.erase(best);
            return block;
        }
    }
    return allocate(bytes ? bytes : line);
}

void return_block(Block block) {
    std::lock_guard<std::mutex> lock(guard());
    auto& blocks = cache();
    blocks.push_back(block);
    while (total() > cache_capacity) {
        free_aligned(blocks.front().address);
        blocks.erase(blocks.begin());
    }
}

std::size_t cached_memory() {
    std::lock_guard<std::mutex> lock(guard());
    return total();
}

void release_memory() {
    std::lock_guard<std::mutex> lock(guard());
    for (const Block& block : cache()) free_aligned(block.address);
    cache().clear();
}

}  // namespace egru
