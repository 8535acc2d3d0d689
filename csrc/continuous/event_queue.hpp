// Which unit has the least key.
#pragma once

#include <cstdint>
#include <vector>

namespace egru::continuous {

// Where an event changes the keys of few of many units, a binary heap that knows where each unit is; else a search
// through all keys, which the kernels do in vectors.
class Queue {
public:
    using Lowest = int (*)(const double* keys, int count);

    Queue(const double* keys, int count, bool heap, Lowest lowest) : keys_(keys), count_(count), lowest_(lowest) {
        if (!heap) return;
        where_.resize(static_cast<size_t>(count));
        for (int i = 0; i < count; ++i) {
            order_.push_back({-1, i});  // in order as long as all are equal
            where_[static_cast<size_t>(i)] = static_cast<size_t>(i);
        }
    }

    // After the key of a unit has changed. The heap keeps keys of its own, so that several may have changed by then.
    void changed(int unit) {
        if (order_.empty()) return;
        const Entry entry{keys_[unit], unit};
        const size_t i = where_[static_cast<size_t>(unit)];
        if (i > 0 && before(entry, order_[(i - 1) / 2]))
            rise(i, entry);
        else
            sink(i, entry);
    }
    int top() const { return order_.empty() ? lowest_(keys_, count_) : order_[0].unit; }

private:
    struct Entry {
        double key;
        int32_t unit;
    };
    static bool before(const Entry& a, const Entry& b) { return a.key < b.key || (a.key == b.key && a.unit < b.unit); }
    void place(size_t i, const Entry& entry) {
        order_[i] = entry;
        where_[static_cast<size_t>(entry.unit)] = i;
    }
    void rise(size_t i, const Entry& entry) {
        for (; i > 0 && before(entry, order_[(i - 1) / 2]); i = (i - 1) / 2) place(i, order_[(i - 1) / 2]);
        place(i, entry);
    }
    void sink(size_t i, const Entry& entry) {
        const size_t size = order_.size();
        for (;;) {
            size_t child = 2 * i + 1;
            if (child >= size) break;
            if (child + 1 < size && before(order_[child + 1], order_[child])) ++child;
            if (!before(order_[child], entry)) break;
            place(i, order_[child]);
            i = child;
        }
        place(i, entry);
    }

    const double* keys_;
    int count_;
    Lowest lowest_;
    std::vector<Entry> order_;
    std::vector<size_t> where_;
};

}  // namespace egru::continuous
