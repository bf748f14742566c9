/* 16-bit floating-point numbers, widened to float32, exactly. */
#ifndef MPISTRAT_HALF_H
#define MPISTRAT_HALF_H
#include "loops.h"

static ALWAYS_INLINE float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static ALWAYS_INLINE uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* float16: fraction and exponent move to float32's place; a subnormal number is an integer times 2^-24, exactly. One of the two is
taken by a mask: with a choice between floats the loop would not be done in vectors. */
static ALWAYS_INLINE float from_float16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    uint32_t shifted = (rest << 13) + (rest >= 0x7c00 ? (255u - 31u) << 23 : (127u - 15u) << 23);
    uint32_t is_subnormal = -(uint32_t)(rest < 0x0400);
    uint32_t subnormal = bits_of((float)(int32_t)rest * 0x1p-24f);
    return float_of(sign | (subnormal & is_subnormal) | (shifted & ~is_subnormal));
}

static ALWAYS_INLINE float from_bfloat16(uint16_t bits) { return float_of((uint32_t)bits << 16); }

#endif
