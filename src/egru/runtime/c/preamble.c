#include "model.h"

#include <limits.h>
#include <stddef.h>

#if MODEL_FINGERPRINT != MODEL_FINGERPRINT_VALUE
#error "model.h and model.c do not belong together: export the model again"
#endif
#if INT_MAX < 2147483647
#error "model.c requires an int of at least 32 bits"
#endif
#if INTEGER
#else
#ifdef __FAST_MATH__
#error "compile model.c without -ffast-math"
#endif
#ifdef __clang__
#pragma STDC FP_CONTRACT OFF
#endif
#endif

