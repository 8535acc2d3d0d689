
/* Write the outputs from the events of the last layer. */
static void write_output(model_state *state, float *out)
{
    int j;
#if MEAN
    const double scale = 1.0 / (double)++state->trace_steps;
#endif
#if READOUT
#if TRACE
    clear(out, MODEL_OUTPUTS);
#else
    copy(out, readout_bias, MODEL_OUTPUTS);
#endif
    ADD_READOUT;
#ifdef MODEL_COUNTERS
    state->macs += (uint64_t)state->count_LAST * MODEL_OUTPUTS;
#endif
#else
    clear(out, MODEL_OUTPUTS);
    for (j = 0; j < state->count_LAST; ++j)
        out[state->index_LAST[j]] = state->value_LAST[j];
#endif
#if TRACE
    for (j = 0; j < MODEL_OUTPUTS; ++j) {
        const double trace = DECAY_VALUE * state->trace[j] + (double)out[j];
        state->trace[j] = trace;
        out[j] = (float)(TRACE_OUTPUT);
    }
#else
#if READOUT
    (void)j;
#endif
#endif
}

/* Compute one step from inputs that have been checked. */
static int step_checked(model_state *state, const uint16_t *index, const float *value, int count, float *out)
{
    int finite = 1;
STEP_LAYERS
    write_output(state, out);
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

/* ---- state ---- */

void model_reset(model_state *state)
{
RESET_LAYERS
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

BYTES

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
#if DENSE_Y_ANY

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
    (void)put(saved, (uint64_t)state->trace_steps, 8);
#else
    (void)saved;
#endif
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
#endif
    return 0;
}
