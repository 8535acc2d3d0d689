// How many threads run the next steps of an engine.
//
// A team pays for waking its threads and for barriers at every step, so small steps are faster on one thread. On busy
// cores a team may be much slower. The choice therefore follows measured times: seconds per unit of work on one thread,
// and the time of a team compared with the time that one thread would take. It never changes a result.
#pragma once

#include <algorithm>
#include <chrono>

namespace egru::engine {

class TeamSize {
public:
    explicit TeamSize(int threads) : threads_(threads) {}

    // Use all threads, whatever the work. For tests.
    void always_divide(bool value) { always_divide_ = value; }
    int last() const { return last_; }

    // Run `body(threads)` with the number of threads chosen for `steps` steps. `body` returns its work in
    // multiply-adds.
    template <class Body>
    void run(int steps, Body body) {
        last_ = threads_;
        if (threads_ == 1 || always_divide_) {
            body(last_);
            return;
        }
        const double begin = now();
        last_ = choose(steps, begin - end_);
        const double work = body(last_);
        end_ = now();
        record(work, steps, end_ - begin);
    }

    // The two halves of `run`, for tests with simulated times.
    int choose(int steps, double gap) {
        streak_ = gap < awake ? streak_ + 1 : 0;
        const double step = alone_ * work_;  // predicted seconds per step on one thread
        const int team = std::min(threads_, static_cast<int>(step / min_share));
        const bool small = team < 2 || (streak_ < streak_needed && step * steps < wake_worth);
        if (!small && pause_ == 0) return last_ = team;
        if (pause_ > 0) --pause_;
        return last_ = 1;
    }

    void record(double work, int steps, double seconds) {
        if (work <= 0) return;  // every stream was masked
        work_ += (work / steps - work_) / (work_ == 0 ? 1 : samples);
        if (last_ == 1) {
            const double cost = seconds / work;
            // A preempted call counts at most four times the average, also if it was the first one.
            alone_ = alone_ == 0 ? cost : std::min(alone_, 4 * cost);
            alone_ += (std::min(cost, 4 * alone_) - alone_) / samples;
            return;
        }
        const double expected = alone_ * work;
        if (++teams_ <= warm_up) {
            if (seconds > expected + longest_wake) stop();
            return;
        }
        together_ += seconds;
        expected_ += expected;
        ++window_;
        if (together_ > window * expected) return stop();  // already slower than the complete window on one thread
        if (window_ < window) return;
        if (together_ > worth * expected_) return stop();
        clear_window();
        if (teams_ >= refresh) {
            pause_ = samples;
            teams_ = 0;
            next_pause_ = std::max(first_pause, next_pause_ / 2);
        }
    }

private:
    // Seconds of work per thread and step. With less, the barriers cost more than another thread gains.
    static constexpr double min_share = 6e-6;
    static constexpr double awake = 10e-6;         // workers wait at least this long for the next call
    static constexpr double wake_worth = 200e-6;   // seconds of work in one call that are worth waking workers
    static constexpr double longest_wake = 500e-6; // workers that take longer have no free core
    static constexpr double worth = 0.95;          // a team must take at most this part of the time of one thread
    static constexpr int streak_needed = 8;        // calls in quick succession that are worth waking workers, too
    static constexpr int warm_up = 2;              // calls of a new team that are not compared: workers were asleep
    static constexpr int window = 8;               // calls of a team that are compared together
    static constexpr int refresh = 2048, samples = 8;  // after 2048 calls of a team, measure 8 calls on one thread
    static constexpr int first_pause = 64, longest_pause = 1 << 16;  // calls on one thread after a slow team

    static double now() {
        return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }

    void stop() {
        pause_ = next_pause_;
        teams_ = 0;
        next_pause_ = std::min(2 * next_pause_, longest_pause);
        clear_window();
    }

    void clear_window() {
        together_ = expected_ = 0;
        window_ = 0;
    }

    const int threads_;
    bool always_divide_ = false;
    int last_ = 1;
    double alone_ = 0;                    // seconds per unit of work on one thread
    double work_ = 0;                     // work per step, averaged over about eight calls
    double together_ = 0, expected_ = 0;  // seconds of the current window: with the team, and predicted for one thread
    int window_ = 0;                      // calls in the current window
    double end_ = 0;                      // when the last call ended
    int streak_ = 0;                      // calls in quick succession
    int teams_ = 0;                       // calls with a team since the last pause
    int pause_ = samples;                 // calls that still run on one thread
    int next_pause_ = first_pause;
};

}  // namespace egru::engine
