/* The update rules of the optimizers, for each type of numbers. */
#include "loops.h"

#define REAL float
#define NAME(function) function##_float
#define SQRT sqrtf
#include "rules_of_type.h"
#undef REAL
#undef NAME
#undef SQRT
#define REAL double
#define NAME(function) function##_double
#define SQRT sqrt
#include "rules_of_type.h"

#define RULE(NAME, SLOTS, NUMBERS, NEEDED, WRITES) \
    {#NAME, SLOTS, NUMBERS, NEEDED, WRITES, apply_##NAME##_float, apply_##NAME##_double}

const Rule rules[] = {
    RULE(adam, 3, 4, 2, 1),    RULE(sgd, 1, 3, 0, 1),        RULE(adagrad, 1, 2, 1, 1),
    RULE(rmsprop, 3, 5, 1, 1), RULE(accumulate, 1, 0, 1, 0), {0},
};
