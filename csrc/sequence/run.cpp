#include "sequence/run.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "common/memory.hpp"

namespace egru {
namespace {

constexpr int checked = 8;  // weights that are checked in the time of one multiplication
constexpr double slow_chunk = 0.2;  // seconds that a forward chunk should not exceed: interrupts wait for its end

// Whether all sequences start without events. Only looks at states that share one row, as layers pass them.
bool starts_at_rest(const TrainCall& call) {
    if (call.B > 1 && call.y0_b != 0) return false;
    const auto* bytes = reinterpret_cast<const unsigned char*>(call.y0);
    const std::size_t count = static_cast<std::size_t>(call.H) * (call.float64 ? sizeof(double) : sizeof(float));
    return bytes[0] == 0 && std::memcmp(bytes, bytes + 1, count - 1) == 0;
}

// The share of zero blocks of 16 rows and one column in a matrix (gates * H, width), estimated from a few columns of
// each block of rows. Takes little time if there are no zeros.
template <class S>
double zero_blocks(const S* weight, int gates, int H, int width) {
    constexpr int rows = 16, samples = 16, step = 8;
    std::int64_t zeros = 0, count = 0;
    int at = 0;
    for (int gate = 0; gate < gates; ++gate)
        for (int unit = 0; unit < H; unit += rows)
            for (int sample = 0; sample < samples; sample += step) {
                const int columns = std::min(step, width);
                at = (at + 5 * step) % (width - columns + 1);
                unsigned left = (1u << columns) - 1;  // columns that are zero so far
                for (int i = unit; left && i < std::min(unit + rows, H); ++i) {
                    const S* row = weight + (std::int64_t(gate) * H + i) * width + at;
                    for (int k = 0; k < columns; ++k) left &= ~(unsigned(row[k] != 0) << k);
                }
                count += columns;
                for (; left; left &= left - 1) ++zeros;
            }
    return double(zeros) / double(count);
}

bool has_zero_blocks(const TrainCall& call, std::uintptr_t weight, int width, double least) {
    constexpr int narrowest = 32, widest = 1 << 16;  // fewer sources gain nothing, and they are listed in 16 bits
    if (least > 1 || width > widest || (width < narrowest && least > 0)) return false;
    const int gates = call.lstm ? 4 : 3;
    const void* values = reinterpret_cast<const void*>(weight);
    const double share = call.float64 ? zero_blocks(static_cast<const double*>(values), gates, call.H, width)
                                      : zero_blocks(static_cast<const float*>(values), gates, call.H, width);
    return share >= least;
}

// Choose the products of a call. A single step from rest reads the recurrent weights only to check them.
void prepare(TrainCall& call, bool forward) {
    call.rest = starts_at_rest(call);
    const bool single = call.rest && call.T == 1;
    call.direct = call.direct || single;
    call.direct_gates = call.direct_gates || single;
    // A product with the input that does not skip blocks reads the weights once for several steps.
    const double least_ih = call.zero_blocks > 0 && forward ? call.zero_blocks + 0.1 : call.zero_blocks;
    call.skip_hh = !call.direct && has_zero_blocks(call, call.weight_hh, call.H, call.zero_blocks);
    call.skip_ih = !call.direct && (forward ? !call.direct_input : call.grad_input != 0) &&
                   has_zero_blocks(call, call.weight_ih, call.I, least_ih);
    const std::int64_t rows = std::int64_t(call.lstm ? 4 : 3) * call.H;
    if (single && rows * (std::int64_t(call.B) * call.I + call.H / checked) <= call.one_thread) call.threads = 1;
}

class Workspace {
public:
    Workspace(TrainCall& call, std::int64_t bytes) : block_(acquire_block(static_cast<std::size_t>(bytes))) {
        call.workspace = reinterpret_cast<std::uintptr_t>(block_.address);
    }
    ~Workspace() { return_block(block_); }
    Workspace(const Workspace&) = delete;
    Workspace& operator=(const Workspace&) = delete;

private:
    Block block_;
};

}  // namespace

int run_forward(TrainCall& call, Poll poll) {
    prepare(call, true);
    const ForwardTable& table = call.lstm ? EGRU_PICK(lstm_forward_table) : EGRU_PICK(forward_table);
    const Workspace workspace(call, table.workspace(call));
    int bad = table.begin(call);
    if (bad) return bad;
    int steps = call.T <= call.chunk ? call.T : std::max(1, call.chunk / 4);
    for (call.first = 0; call.first < call.T; call.first = call.last) {
        if (call.first) poll();
        const auto start = std::chrono::steady_clock::now();
        call.last = std::min(call.first + steps, call.T);
        bad |= table.chunk(call);
        // Results do not depend on the length of the chunks. On a busy machine they become shorter.
        const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
        steps = elapsed.count() > slow_chunk ? std::max(1, steps / 2) : std::min(call.chunk, 2 * steps);
    }
    return bad | table.finish(call);
}

void run_backward(TrainCall& call, Poll poll) {
    prepare(call, false);
    const BackwardTable& table = call.lstm ? EGRU_PICK(lstm_backward_table) : EGRU_PICK(backward_table);
    const Workspace workspace(call, table.workspace(call));
    table.begin(call);
    for (call.last = call.T; call.last > 0; call.last = call.first) {
        if (call.last < call.T) poll();
        call.first = (call.last - 1) / call.chunk * call.chunk;
        table.chunk(call);
    }
    table.finish(call);
}

}  // namespace egru
