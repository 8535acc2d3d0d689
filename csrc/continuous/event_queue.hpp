// A priority queue of units by the times of their next events.
#pragma once

#include <cstdint>
#include <vector>

namespace egru::continuous {

// Finds the unit with the smallest key. If events change few keys of a large network, it is an indexed binary heap.
// Otherwise it is a vectorised linear search, which is faster for small or dense networks.
class EventQueue {
    struct Entry {
        double key;
        int32_t unit;
    };

public:
    using ArgMin = int (*)(const double* keys, int count);

    EventQueue(const double* keys, int count, bool use_heap, ArgMin argmin)
        : keys_(keys), count_(count), argmin_(argmin) {
        if (!use_heap) return;
        positions_.resize(static_cast<size_t>(count));
        for (int i = 0; i < count; ++i) {
            heap_.push_back({-1, i});  // equal keys in ascending order are a valid heap
            positions_[static_cast<size_t>(i)] = static_cast<size_t>(i);
        }
    }

    // Call after the key of a unit has changed. The heap copies keys, so several may change before the first call.
    void update(int unit) {
        if (heap_.empty()) return;
        const Entry entry{keys_[unit], unit};
        const size_t i = positions_[static_cast<size_t>(unit)];
        if (i > 0 && precedes(entry, heap_[(i - 1) / 2]))
            sift_up(i, entry);
        else
            sift_down(i, entry);
    }
    // The order of the heap, which cannot be derived from the keys.
    struct Order {
        std::vector<Entry> heap;
        std::vector<size_t> positions;
    };
    Order order() const { return {heap_, positions_}; }
    void restore(const Order& order) {
        heap_ = order.heap;
        positions_ = order.positions;
    }
    int top() const { return heap_.empty() ? argmin_(keys_, count_) : heap_[0].unit; }

private:
    static bool precedes(const Entry& a, const Entry& b) {
        return a.key < b.key || (a.key == b.key && a.unit < b.unit);
    }
    void place(size_t i, const Entry& entry) {
        heap_[i] = entry;
        positions_[static_cast<size_t>(entry.unit)] = i;
    }
    void sift_up(size_t i, const Entry& entry) {
        for (; i > 0 && precedes(entry, heap_[(i - 1) / 2]); i = (i - 1) / 2) place(i, heap_[(i - 1) / 2]);
        place(i, entry);
    }
    void sift_down(size_t i, const Entry& entry) {
        const size_t size = heap_.size();
        for (;;) {
            size_t child = 2 * i + 1;
            if (child >= size) break;
            if (child + 1 < size && precedes(heap_[child + 1], heap_[child])) ++child;
            if (!precedes(heap_[child], entry)) break;
            place(i, heap_[child]);
            i = child;
        }
        place(i, entry);
    }

    const double* keys_;
    int count_;
    ArgMin argmin_;
    std::vector<Entry> heap_;
    std::vector<size_t> positions_;
};

}  // namespace egru::continuous
