#include "common/events.hpp"

#include <stdexcept>
#include <string>

namespace egru {

const char* events_name(Events events) {
    switch (events) {
        case Events::positive: return "positive";
        case Events::two_sided: return "signed";
        case Events::delta: return "delta";
    }
    return "unknown";
}

Events parse_events(const char* name) {
    for (const Events events : {Events::positive, Events::two_sided, Events::delta})
        if (std::string(name) == events_name(events)) return events;
    throw std::invalid_argument(std::string("events must be one of positive, signed, delta, got '") + name + "'");
}

}  // namespace egru
