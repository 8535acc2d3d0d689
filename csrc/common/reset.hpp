// How a unit is cleared after an event. The equations are in src/egru/types.py.
#pragma once

namespace egru {

enum class Reset : int { output, threshold, hard, none };

const char* reset_name(Reset reset);
Reset parse_reset(const char* name);  // throws std::invalid_argument if there is no such reset

}  // namespace egru
