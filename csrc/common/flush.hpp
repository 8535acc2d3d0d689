// Processors of Intel take about a hundred times as long for an operation with a subnormal number (below 1e-38 in
// float32). Gradients that decay over many steps end there.
#pragma once

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace egru {

// While it lives, results of this thread that would be subnormal are zero. Subnormal operands are still read as they
// are, so that comparisons with a threshold remain exact. Always inlined, as in threads.hpp.
class FlushSubnormals {
public:
#if defined(__SSE2__)
    [[gnu::always_inline]] FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | flush_to_zero); }
    [[gnu::always_inline]] ~FlushSubnormals() { _mm_setcsr(saved_); }
#else
    [[gnu::always_inline]] FlushSubnormals() {}
    [[gnu::always_inline]] ~FlushSubnormals() {}  // a destructor, so that the variable counts as used
#endif
    FlushSubnormals(const FlushSubnormals&) = delete;
    FlushSubnormals& operator=(const FlushSubnormals&) = delete;

private:
#if defined(__SSE2__)
    static constexpr unsigned flush_to_zero = 0x8000;
    unsigned saved_;
#endif
};

}  // namespace egru
