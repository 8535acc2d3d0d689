// The smallest kernel: shows that a level's code runs, and how a level source is laid out.
#include "smoke.hpp"

namespace egru::EGRU_LEVEL {
namespace {

double sum(const double* values, long count) {
    double total = 0;
    for (long i = 0; i < count; ++i) total += values[i];
    return total;
}

}  // namespace

const SmokeTable smoke_table{sum};

}  // namespace egru::EGRU_LEVEL
