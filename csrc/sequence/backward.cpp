// The backward pass of the GRU.
#include "sequence/backward_chunk.hpp"
#include "sequence/backward_direct.hpp"
#include "sequence/backward_entry.hpp"
#include "sequence/backward_recursion.hpp"

namespace egru::EGRU_LEVEL {

const BackwardTable backward_table = make_backward_table<Backward>();

}  // namespace egru::EGRU_LEVEL
