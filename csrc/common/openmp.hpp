// The threads of torch, through the OpenMP runtime that torch has loaded.
//
// After a parallel operation torch's threads spin for milliseconds. On a machine without spare cores they would compete
// with threads of our own. The core does not link OpenMP: it looks for the library in the process.
#pragma once

namespace egru {

// Run `body(context, index, size)` on the members of an OpenMP team, including the caller, and wait for all of them.
// The team may have fewer or more members than `threads`. Returns false, without running anything, if there is no such
// runtime or it cannot be used: only GNU's is known to behave, and in a forked child it would wait for threads that do
// not exist.
bool run_openmp(int threads, void (*body)(void* context, int index, int size), void* context);

// Whether run_openmp can run a team.
bool openmp_available();

}  // namespace egru
