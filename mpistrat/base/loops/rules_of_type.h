/* The update rules for one type of numbers: REAL is float or double, NAME(f) the name of f for it, SQRT its square root.

Each is written in the order of the NumPy code that it stands for (optimizers/rules.py), each result
rounded to REAL: so both give the same bits. `rules.c` includes this file once for each type. */

CLONES static void NAME(adam)(long n, REAL *restrict w, const REAL *restrict gradient, REAL *restrict m, REAL *restrict v,
                              REAL alpha, REAL rest_1, REAL rest_2, REAL epsilon) {
    for (long i = 0; i < n; i++) {
        REAL g = gradient[i];
        REAL mean = m[i] + (g - m[i]) * rest_1;
        REAL square = v[i] + (g * g - v[i]) * rest_2;
        m[i] = mean;
        v[i] = square;
        w[i] -= mean * alpha / (SQRT(square) + epsilon);
    }
}

CLONES static void NAME(amsgrad)(long n, REAL *restrict w, const REAL *restrict gradient, REAL *restrict m, REAL *restrict v,
                                 REAL *restrict largest, REAL alpha, REAL rest_1, REAL rest_2, REAL epsilon) {
    for (long i = 0; i < n; i++) {
        REAL g = gradient[i];
        REAL mean = m[i] + (g - m[i]) * rest_1;
        REAL square = v[i] + (g * g - v[i]) * rest_2;
        REAL before = largest[i];
        /* A NaN stays, as in np.maximum, which unlike `>` takes none for an error. */
        REAL first = before == before ? before : 0, second = square == square ? square : 0;
        REAL most = first > second ? before : square;
        most = before != before ? before : square != square ? square : most;
        m[i] = mean;
        v[i] = square;
        largest[i] = most;
        w[i] -= mean * alpha / (SQRT(most) + epsilon);
    }
}

CLONES static void NAME(sgd)(long n, REAL *restrict w, const REAL *restrict gradient, REAL rate) {
    for (long i = 0; i < n; i++) w[i] -= gradient[i] * rate;
}

CLONES static void NAME(momentum)(long n, REAL *restrict w, const REAL *restrict gradient, REAL *restrict m, REAL rate,
                                  REAL kept) {
    for (long i = 0; i < n; i++) {
        m[i] = m[i] * kept - gradient[i] * rate;
        w[i] += m[i];
    }
}

CLONES static void NAME(nesterov)(long n, REAL *restrict w, const REAL *restrict gradient, REAL *restrict m, REAL rate,
                                  REAL kept) {
    for (long i = 0; i < n; i++) {
        REAL step = gradient[i] * rate;
        m[i] = m[i] * kept - step;
        w[i] += m[i] * kept - step;
    }
}

CLONES static void NAME(adagrad)(long n, REAL *restrict w, const REAL *restrict gradient, REAL *restrict sum, REAL rate,
                                 REAL epsilon) {
    for (long i = 0; i < n; i++) {
        REAL g = gradient[i];
        sum[i] += g * g;
        w[i] -= g * rate / SQRT(sum[i] + epsilon);
    }
}

/* `mean` and `m` are null where the rule is not centered, and where it has no momentum: known to each caller below. */
static ALWAYS_INLINE void NAME(rmsprop_by)(long n, REAL *restrict w, const REAL *restrict gradient, REAL *restrict v,
                                           REAL *restrict mean, REAL *restrict m, REAL rate, REAL rho, REAL rest,
                                           REAL kept, REAL epsilon) {
    for (long i = 0; i < n; i++) {
        REAL g = gradient[i];
        v[i] = v[i] * rho + g * g * rest;
        REAL spread = v[i];
        if (mean) {
            mean[i] = mean[i] * rho + g * rest;
            spread -= mean[i] * mean[i];
        }
        REAL step = g * rate / SQRT(spread + epsilon);
        if (m) step = m[i] = m[i] * kept + step;
        w[i] -= step;
    }
}

CLONES static void NAME(rmsprop)(long n, REAL *restrict w, const REAL *restrict gradient, REAL *restrict v, REAL *restrict mean,
                                 REAL *restrict m, REAL rate, REAL rho, REAL rest, REAL kept, REAL epsilon) {
    if (mean && m) NAME(rmsprop_by)(n, w, gradient, v, mean, m, rate, rho, rest, kept, epsilon);
    else if (mean) NAME(rmsprop_by)(n, w, gradient, v, mean, NULL, rate, rho, rest, kept, epsilon);
    else if (m) NAME(rmsprop_by)(n, w, gradient, v, NULL, m, rate, rho, rest, kept, epsilon);
    else NAME(rmsprop_by)(n, w, gradient, v, NULL, NULL, rate, rho, rest, kept, epsilon);
}

/* ---- each as rules.c lists them: its slots and numbers in this order */

/* momentum, velocity, velocity_hat; alpha, 1 - beta_1, 1 - beta_2, epsilon */
static void NAME(apply_adam)(long n, REAL *w, const REAL *gradient, REAL *const *slots, const double *number) {
    REAL alpha = (REAL)number[0], rest_1 = (REAL)number[1], rest_2 = (REAL)number[2], epsilon = (REAL)number[3];
    if (slots[2]) NAME(amsgrad)(n, w, gradient, slots[0], slots[1], slots[2], alpha, rest_1, rest_2, epsilon);
    else NAME(adam)(n, w, gradient, slots[0], slots[1], alpha, rest_1, rest_2, epsilon);
}

/* momentum; rate, momentum, nesterov */
static void NAME(apply_sgd)(long n, REAL *w, const REAL *gradient, REAL *const *slots, const double *number) {
    REAL rate = (REAL)number[0], kept = (REAL)number[1];
    if (!slots[0]) NAME(sgd)(n, w, gradient, rate);
    else if (number[2]) NAME(nesterov)(n, w, gradient, slots[0], rate, kept);
    else NAME(momentum)(n, w, gradient, slots[0], rate, kept);
}

/* accumulator; rate, epsilon */
static void NAME(apply_adagrad)(long n, REAL *w, const REAL *gradient, REAL *const *slots, const double *number) {
    NAME(adagrad)(n, w, gradient, slots[0], (REAL)number[0], (REAL)number[1]);
}

/* velocity, average_gradient, momentum; rate, rho, 1 - rho, momentum, epsilon */
static void NAME(apply_rmsprop)(long n, REAL *w, const REAL *gradient, REAL *const *slots, const double *number) {
    NAME(rmsprop)(n, w, gradient, slots[0], slots[1], slots[2], (REAL)number[0], (REAL)number[1], (REAL)number[2],
                  (REAL)number[3], (REAL)number[4]);
}

/* gradient_accumulator; no numbers: the weights stay */
CLONES static void NAME(apply_accumulate)(long n, REAL *w, const REAL *gradient, REAL *const *slots, const double *number) {
    REAL *restrict sum = slots[0];
    (void)w, (void)number;
    for (long i = 0; i < n; i++) sum[i] += gradient[i];
}
