#include "model.h"

#include <limits.h>
#include <stddef.h>

#if MODEL_FINGERPRINT != MODEL_FINGERPRINT_VALUE
#error "model.h and model.c do not belong together: export the model again"
#endif
#if INT_MAX < 2147483647
#error "model.c requires an int of at least 32 bits"
#endif
#if defined(__ARM_NEON) && defined(__aarch64__) && !defined(__AARCH64EB__)
#define MODEL_NEON 1
#include <arm_neon.h>
#else
#define MODEL_NEON 0
#endif
#ifdef __SSE2__
#include <emmintrin.h>
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
#if DENSE

/* int8 weights are stored in groups of four columns. MODEL_ROWS selects how, and which loop adds them:
 * 3: bytes plus 128, for blocks of 64 columns in the registers of NEON;
 * 2: bytes, every second one plus 128, for pairs of rows in SSE2;
 * 1: words, for the 64-bit multiply-add of Thumb-2 processors without vectors;
 * 0: bytes, for a loop that compilers vectorise. */
#ifndef MODEL_ROWS
#if defined(__SSE2__)
#define MODEL_ROWS 2
#elif MODEL_NEON
#define MODEL_ROWS 3
#elif defined(__ARM_ARCH_ISA_THUMB) && __ARM_ARCH_ISA_THUMB >= 2 && !defined(__ARM_NEON) && !defined(__ARM_FEATURE_MVE)
#define MODEL_ROWS 1
#else
#define MODEL_ROWS 0
#endif
#endif
#if MODEL_ROWS == 3
typedef uint8_t weight;
enum { weights_per_group = 4 };
#define W(a, b, c, d) (a) + 128, (b) + 128, (c) + 128, (d) + 128
#elif MODEL_ROWS == 2
typedef uint8_t weight;
enum { weights_per_group = 4 };
#define W(a, b, c, d) (a) + 128, (b)&255, (c) + 128, (d)&255
#elif MODEL_ROWS == 1
typedef uint32_t weight;
enum { weights_per_group = 1 };
#define BYTE(value, position) (((uint32_t)(value)&255u) << (position))
#define W(a, b, c, d) BYTE((a) + 128, 0) | BYTE(b, 24) | BYTE((c) + 128, 16) | BYTE(d, 8)
#else
typedef int8_t weight;
enum { weights_per_group = 4 };
#define W(a, b, c, d) a, b, c, d
#endif
#endif

