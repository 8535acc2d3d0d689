
/* Write the outputs from the events of the last layer. */
static void write_output(model_state *state, float *out)
{
    int j;
#if MEAN
    const double scale = 1.0 / (double)++state->trace_steps;
#endif
#if READOUT
    const uint16_t *index = state->index_LAST;
    const float *value = state->value_LAST;
    int count = state->count_LAST;
#if HELD_OUTPUT
    float *sum = state->readout_sum;
    if (state->age == 0) { /* compute the sums from the outputs, not from their changes */
        index = state->work.held_index;
        value = state->work.held_value;
        count = list_held(state->y_LAST, hidden_LAST, state->work.held_index, state->work.held_value);
    }
    if (state->age == 0)
#else
    float *sum = out;
#endif
#if TRACE
        clear(sum, MODEL_OUTPUTS);
#else
        copy(sum, readout_bias, MODEL_OUTPUTS);
#endif
    ADD_READOUT;
#ifdef MODEL_COUNTERS
    state->macs += (uint64_t)count * MODEL_OUTPUTS;
#endif
#if HELD_OUTPUT
    copy(out, sum, MODEL_OUTPUTS);
#endif
#else
#if HELD_OUTPUT
    copy(out, state->y_LAST, MODEL_OUTPUTS);
#else
    clear(out, MODEL_OUTPUTS);
    for (j = 0; j < state->count_LAST; ++j)
        out[state->index_LAST[j]] = state->value_LAST[j];
#endif
#endif
#if TRACE
    for (j = 0; j < MODEL_OUTPUTS; ++j) {
        const double trace = DECAY_VALUE * state->trace[j] + (double)out[j];
        state->trace[j] = trace;
        out[j] = (float)(TRACE_OUTPUT);
    }
#else
    (void)j;
#endif
}

/* Compute one step from inputs that have been checked. */
static int step_checked(model_state *state, const uint16_t *index, const float *value, int count, float *out)
{
    int finite = 1;
STEP_LAYERS
    write_output(state, out);
#if DELTA_ANY
    state->age = (state->age + 1) % REFRESH;
    state->fresh = 0;
#endif
#ifdef MODEL_COUNTERS
    ++state->steps;
#endif
    return finite ? 0 : MODEL_ERROR_STATE;
}

int model_step(model_state *state, const float *x, float *out)
{
    int count = 0, j;
    for (j = 0; j < MODEL_INPUTS; ++j) {
        if (!is_finite(x[j]))
            return MODEL_ERROR_INPUT;
        if (x[j] != 0.0f) {
            state->work.input_index[count] = (uint16_t)j;
            state->work.input_value[count++] = x[j];
        }
    }
    return step_checked(state, state->work.input_index, state->work.input_value, count, out);
}

int model_step_events(model_state *state, const uint16_t *index, const float *value, int count, float *out)
{
    int k, next = 0;
    for (k = 0; k < count; ++k) {
        if (index[k] < next || index[k] >= MODEL_INPUTS || !is_finite(value[k]))
            return MODEL_ERROR_INPUT;
        next = index[k] + 1;
    }
    return count < 0 ? MODEL_ERROR_INPUT : step_checked(state, index, value, count, out);
}
#if TOKENS

int model_step_token(model_state *state, int32_t token, float *out)
{
    if (token < 0 || token >= MODEL_TOKENS)
        return MODEL_ERROR_INPUT;
    return model_step(state, embedding + (size_t)token * MODEL_INPUTS, out);
}
#endif
#if SKIP

#if TRACE
/* Advance the trace by steps at which the output of the last layer does not change. */
static void decay_trace(model_state *state, int64_t steps)
{
    int j;
#if DECAY
    /* kept = decay^steps; total = 1 + decay + ... + decay^(steps - 1), doubling the number of terms. */
    double kept = 1.0, total = 0.0, factor = DECAY_VALUE, terms = 1.0;
    for (; steps > 0; steps >>= 1) {
        if (steps & 1) {
            total = total * factor + terms;
            kept *= factor;
        }
        terms += terms * factor;
        factor *= factor;
    }
#else
    const double kept = 1.0, total = (double)steps;
#endif
    for (j = 0; j < MODEL_OUTPUTS; ++j)
#if HELD_OUTPUT
        state->trace[j] = kept * state->trace[j] + total * (double)HELD_VALUES[j];
#else
        state->trace[j] = kept * state->trace[j];
    (void)total;
#endif
}

#endif
/* The number of steps, at most `limit`, of which all but the last have no events; 0 if the next step is an ordinary
 * one. */
static int64_t silent_steps(model_state *state, int64_t limit)
{
    int64_t first;
#if DELTA_ANY
    if (!state->fresh) { /* the next computation of accumulated sums changes them by rounding */
        if (state->age == 0)
            return 0;
        limit = limit < REFRESH - state->age ? limit : REFRESH - state->age;
    }
#endif
    if (IS_ACTIVE)
        return 0;
FIRST_EVENTS
    return limit;
}

int64_t model_skip(model_state *state, int64_t limit, float *out)
{
    const uint16_t *index = NULL;
    const float *value = NULL;
    const int64_t silent = limit < 1 ? 0 : silent_steps(state, limit);
    const int64_t steps = silent > 0 ? silent : 1;
    int finite = 1, ordinary = silent == 0, count = 0, events;
#if DELTA_ANY
    int changed = 0;
#endif
    if (limit < 1)
        return MODEL_ERROR_INPUT;
#if TRACE
    if (steps > 1)
        decay_trace(state, steps - 1);
#endif
#if MEAN
    state->trace_steps += steps - 1;
#endif
#if DELTA_ANY
    state->age = (int)((state->age + steps - 1) % REFRESH);
#endif
    /* At the last step, the layers above one that has events have an input. */
SKIP_LAYERS
    (void)ordinary;
    write_output(state, out);
#if DELTA_ANY
    state->fresh = !changed && (state->fresh || (silent == 0 && state->age == 0));
    state->age = (state->age + 1) % REFRESH;
#endif
#ifdef MODEL_COUNTERS
    state->steps += (uint64_t)steps;
#endif
    return finite ? steps : MODEL_ERROR_STATE;
}
#endif

/* ---- state ---- */

void model_reset(model_state *state)
{
RESET_LAYERS
#if DELTA_ANY
    state->age = 0;
    state->fresh = 0;
#endif
#if TRACE
    {
        int j;
        for (j = 0; j < MODEL_OUTPUTS; ++j)
            state->trace[j] = 0.0;
    }
#endif
#if MEAN
    state->trace_steps = 0;
#endif
}

int model_events(const model_state *state, int layer, const uint16_t **index, const float **value)
{
    switch (layer) {
EVENTS_OF_LAYERS
    default:
        return MODEL_ERROR_INPUT;
    }
}

BYTE_FUNCTIONS

static uint8_t *put_floats(uint8_t *to, const float *values, int count)
{
    int i;
    for (i = 0; i < count; ++i) {
        float_bits v;
        v.value = values[i];
        to = put(to, v.bits, 4);
    }
    return to;
}

/* Write c, then y from the list of events. */
static uint8_t *put_layer(uint8_t *to, const float *c, const uint16_t *index, const float *value, int count, int hidden)
{
    int j;
    to = put_floats(to, c, hidden);
    for (j = 0; j < hidden; ++j)
        to = put(to, 0, 4);
    for (j = 0; j < count; ++j)
        (void)put_floats(to - 4 * (hidden - index[j]), value + j, 1);
    return to;
}

static float get_float(const uint8_t *from)
{
    float_bits v;
    v.bits = (uint32_t)get(from, 4);
    return v.value;
}

#if DELTA_ANY

static const uint8_t *get_floats(const uint8_t *from, float *values, int count)
{
    int i;
    for (i = 0; i < count; ++i, from += 4)
        values[i] = get_float(from);
    return from;
}
#endif

static int get_layer(const uint8_t *from, float *c, uint16_t *index, float *value, int hidden)
{
    int count = 0, j;
    for (j = 0; j < hidden; ++j)
        c[j] = get_float(from + 4 * j);
    for (j = 0; j < hidden; ++j) {
        const float y = get_float(from + 4 * (hidden + j));
        if (y != 0.0f) {
            index[count] = (uint16_t)j;
            value[count++] = y;
        }
    }
    return count;
}
#if SPARSE_Y_ANY

static void spread(float *y, const uint16_t *index, const float *value, int count, int hidden)
{
    int k;
    clear(y, hidden);
    for (k = 0; k < count; ++k)
        y[index[k]] = value[k];
}
#endif
#if TRACE

typedef union {
    double value;
    uint64_t bits;
} double_bits;
#endif

void model_save(const model_state *state, uint8_t *saved)
{
    saved = put(saved, 0x55524745u, 4);
    saved = put(saved, MODEL_FINGERPRINT, 4);
SAVE_LAYERS
#if TRACE
    {
        int j;
        for (j = 0; j < MODEL_OUTPUTS; ++j) {
            double_bits v;
            v.value = state->trace[j];
            saved = put(saved, v.bits, 8);
        }
    }
#endif
#if MEAN
    saved = put(saved, (uint64_t)state->trace_steps, 8);
#endif
#if DELTA_ANY
    saved = put(saved, (uint64_t)state->age, 4);
    saved = put(saved, (uint64_t)state->fresh, 4);
#endif
    (void)saved;
}

int model_restore(model_state *state, const uint8_t *saved)
{
    int j;
    if (get(saved, 4) != 0x55524745u || get(saved + 4, 4) != MODEL_FINGERPRINT)
        return MODEL_ERROR_SAVED;
    saved += 8;
    for (j = 0; j < SAVED_FLOATS; ++j)
        if (!is_finite(get_float(saved + 4 * j)))
            return MODEL_ERROR_SAVED;
#if TRACE
    for (j = 0; j < MODEL_OUTPUTS; ++j) {
        double_bits v;
        v.bits = get(saved + 4 * SAVED_FLOATS + 8 * j, 8);
        if (v.value - v.value != 0.0)
            return MODEL_ERROR_SAVED;
    }
#endif
#if MEAN
    if (get(saved + 4 * SAVED_FLOATS + 8 * MODEL_OUTPUTS, 8) >> 63 != 0)
        return MODEL_ERROR_SAVED;
#endif
#if DELTA_ANY
    if (get(saved + MODEL_SAVED_BYTES - 16, 4) >= REFRESH || get(saved + MODEL_SAVED_BYTES - 12, 4) > 1)
        return MODEL_ERROR_SAVED;
#endif
RESTORE_LAYERS
#if TRACE
    for (j = 0; j < MODEL_OUTPUTS; ++j, saved += 8) {
        double_bits v;
        v.bits = get(saved, 8);
        state->trace[j] = v.value;
    }
#endif
#if MEAN
    state->trace_steps = (int64_t)get(saved, 8);
    saved += 8;
#endif
#if DELTA_ANY
    state->age = (int)get(saved, 4);
    state->fresh = (int)get(saved + 4, 4);
#endif
    (void)saved;
    return 0;
}
