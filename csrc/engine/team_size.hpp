// How many threads run the next steps of an engine.
//
// A team pays for waking its threads and for barriers at every step, so small steps are faster on one thread. The choice
// compares measured times: seconds per unit of work on one thread and with a team, and the work of the last call. It
// never changes a result.
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

    // Run `body(threads)` with the number of threads chosen for `steps` steps. `body` returns its work in multiply-adds.
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

private:
    static constexpr double min_share = 6e-6;     // seconds per step and thread that outweigh the barriers of a step
    static constexpr double awake = 10e-6;        // workers wait this long for the next call before they sleep
    static constexpr double wake_worth = 200e-6;  // seconds of work in one call that are worth waking sleeping workers
    static constexpr int streak_needed = 8;       // calls in quick succession that are worth waking them, too
    static constexpr int refresh = 2048, samples = 8;  // every 2048 calls of a team, measure 8 calls on one thread
    static constexpr int warm_up = 2;             // calls of a new team that are not measured: workers were asleep
    static constexpr int first_pause = 64, longest_pause = 1 << 16;  // calls on one thread after a slow team

    static double now() {
        return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }

    int choose(int steps, double gap) {
        streak_ = gap < awake ? streak_ + 1 : 0;
        const double step = alone_ * work_;  // predicted seconds per step on one thread
        const int team = std::min(threads_, static_cast<int>(step / min_share));
        if (teams_ >= refresh) pause_ = samples;
        const bool small = team < 2 || (streak_ < streak_needed && step * steps < wake_worth);
        if (!small && pause_ == 0) return team;
        if (pause_ > 0) --pause_;
        teams_ = 0;
        return 1;
    }

    void record(double work, int steps, double seconds) {
        if (work <= 0) return;  // every stream was masked
        work_ = work / steps;
        if (last_ == 1) {
            blend(alone_, seconds / work, alone_);
            return;
        }
        if (++teams_ <= warm_up) return;
        blend(together_, seconds / work, alone_);
        if (teams_ < 4 * warm_up) return;
        if (together_ < 0.95 * alone_) {
            next_pause_ = first_pause;
        } else {
            pause_ = next_pause_;
            next_pause_ = std::min(2 * next_pause_, longest_pause);
            together_ = 0;
        }
    }

    // Average over about eight calls. A call that was preempted counts at most four times the typical time.
    static void blend(double& mean, double value, double typical) {
        if (typical > 0) value = std::min(value, 4 * typical);
        mean = mean == 0 ? value : mean + (value - mean) / 8;
    }

    const int threads_;
    bool always_divide_ = false;
    int last_ = 1;
    double alone_ = 0, together_ = 0;  // seconds per unit of work
    double work_ = 0;                  // work per step of the last call
    double end_ = 0;                   // when the last call ended
    int streak_ = 0;                   // calls in quick succession
    int teams_ = 0;                    // calls with a team since the last call on one thread
    int pause_ = samples;              // calls that still run on one thread
    int next_pause_ = first_pause;
};

}  // namespace egru::engine
