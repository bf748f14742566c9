/* What a step does on a piece of its elements, for one type of numbers; `update.c` includes this file once for each.

In the order of the NumPy code in optimizers/rule.py (BlockUpdate), each result rounded to REAL: so both give the same bits. */

CLONES static void NAME(multiply)(long n, REAL *values, REAL factor) {
    for (long i = 0; i < n; i++) values[i] *= factor;
}

CLONES static void NAME(form_mean)(long n, REAL *restrict gradient, const REAL *restrict sum, REAL calls) {
    for (long i = 0; i < n; i++) gradient[i] = (gradient[i] + sum[i]) / calls;
}

/* A NaN stays, and is no error. */
CLONES static void NAME(clip)(long n, REAL *values, REAL limit) {
    for (long i = 0; i < n; i++) {
        REAL value = values[i], known = value == value ? value : 0;
        value = known < -limit ? -limit : value;
        values[i] = known > limit ? limit : value;
    }
}

CLONES static void NAME(average)(long n, const REAL *restrict w, REAL *restrict average, REAL kept, REAL rest) {
    for (long i = 0; i < n; i++) {
        REAL part = w[i] * rest;
        average[i] = average[i] * kept + part;
    }
}

/* Multiply those of `values`, elements [low, high), that lie in spans by the spans' factors. */
static void NAME(multiply_spans)(REAL *values, const Spans *spans, long low, long high) {
    for (long i = first_span(spans, low); i < spans->count && spans->span[i].low < high; i++) {
        const Span *span = &spans->span[i];
        long begin = span->low > low ? span->low : low, end = span->high < high ? span->high : high;
        if (begin < end) NAME(multiply)(end - begin, values + (begin - low), (REAL)span->factor);
    }
}

/* Return the gradient of elements [low, high): the sum of the parts, in `piece` if anything else happens to it. */
static const REAL *NAME(gradient_of)(const Update *u, REAL *piece, long low, long high) {
    long n = high - low;
    if (u->count == 1 && u->parts->itemsize == sizeof(REAL) && !u->sum && !u->clips && !u->scales.count && u->factor == 1)
        return (const REAL *)u->parts->buf + low;
    NAME(sum)(piece, u->parts, u->count, low, high);
    if (u->factor != 1) NAME(multiply)(n, piece, (REAL)u->factor);
    if (u->sum) NAME(form_mean)(n, piece, (const REAL *)u->sum + low, (REAL)u->calls);
    NAME(multiply_spans)(piece, &u->scales, low, high);
    if (u->clips) NAME(clip)(n, piece, (REAL)u->limit);
    return piece;
}

static void NAME(update_piece)(const Update *u, long low, long high) {
    REAL piece[PIECE], wide[PIECE], *slots[MOST_SLOTS] = {NULL};
    long n = high - low;
    const REAL *gradient = NAME(gradient_of)(u, piece, low, high);
    REAL *w = WIDEN(u, wide, low, n);
    for (int i = 0; i < u->rule->slots; i++)
        if (u->slots[i]) slots[i] = (REAL *)u->slots[i] + low;
    NAME(multiply_spans)(w, &u->decays, low, high);
    u->rule->APPLY(n, w, gradient, slots, u->number);
    if (u->averages) {
        REAL *average = (REAL *)u->averages + low;
        NAME(average)(n, w, average, (REAL)u->kept, (REAL)u->rest);
        if (u->overwrites) memcpy(w, average, (size_t)n * sizeof *w);
    }
    if (u->rule->writes_weights || (u->averages && u->overwrites)) NARROW(u, wide, low, n);
    if (u->sum) memset((REAL *)u->sum + low, 0, (size_t)n * sizeof(REAL));
}
