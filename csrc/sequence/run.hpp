// Runs a whole call: workspace, chunks, and checks of values.
#pragma once

#include "sequence/train.hpp"

namespace egru {

// Called between two chunks; may throw to stop the call.
using Poll = void (*)();

// Returns the Bad flags of values that are not finite, or 0. Nothing is computed if an argument is not finite.
int run_forward(TrainCall& call, Poll poll);
void run_backward(TrainCall& call, Poll poll);

}  // namespace egru
