// The kinds of events, as defined in src/egru/types.py.
#pragma once

namespace egru {

enum class Events : int { positive, two_sided, delta };  // two_sided: "signed", which is a keyword

const char* events_name(Events events);
Events parse_events(const char* name);  // throws std::invalid_argument if there is no such kind

}  // namespace egru
