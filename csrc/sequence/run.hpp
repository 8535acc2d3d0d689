// Runs a whole call: workspace, chunks, and checks of values.
#pragma once

#include "sequence/train.hpp"

namespace egru {

// Called between two chunks; may throw to stop the call.
using Poll = void (*)();

// Returns the names of what is not finite as a sum of Bad values; 0 if everything is finite. If an argument is not
// finite, nothing is computed.
int run_forward(TrainCall& call, Poll poll);
void run_backward(TrainCall& call, Poll poll);

}  // namespace egru
