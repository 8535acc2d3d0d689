#include "common/reset.hpp"

#include <stdexcept>
#include <string>

namespace egru {
namespace {

constexpr Reset resets[] = {Reset::output, Reset::threshold, Reset::hard, Reset::none};

}  // namespace

const char* reset_name(Reset reset) {
    switch (reset) {
        case Reset::output: return "output";
        case Reset::threshold: return "threshold";
        case Reset::hard: return "hard";
        case Reset::none: return "none";
    }
    return "unknown";
}

Reset parse_reset(const char* name) {
    std::string known;
    for (const Reset reset : resets) {
        if (std::string(name) == reset_name(reset)) return reset;
        known += (known.empty() ? "" : ", ") + std::string(reset_name(reset));
    }
    throw std::invalid_argument("reset must be one of " + known + ", got '" + name + "'");
}

}  // namespace egru
