
/* Write the outputs from the events of the last layer. */
static void write_output(model_state *state, int32_t *out)
{
    int32_t *sum = state->work.sum;
    int j;
#if MEAN
    ++state->trace_steps;
#endif
    clear(sum, MODEL_OUTPUTS);
#if READOUT
    ADD_READOUT;
#ifdef MODEL_COUNTERS
    state->macs += (uint64_t)state->count_LAST * MODEL_OUTPUTS;
#endif
#else
    for (j = 0; j < state->count_LAST; ++j)
        sum[state->index_LAST[j]] = state->value_LAST[j];
#endif
    for (j = 0; j < MODEL_OUTPUTS; ++j) {
#if TRACE
#if DECAY
        int64_t value = state->trace[j] = shift_right_long(state->trace[j] * DECAY_VALUE, DECAY_BITS) + sum[j];
#else
        int64_t value = state->trace[j] += sum[j];
#endif
#if MEAN
        value /= state->trace_steps;
#endif
#else
        const int64_t value = sum[j];
#endif
        out[j] = saturate(OUTPUT);
    }
}

/* Compute one step from inputs that have been checked. */
static int step_checked(model_state *state, const uint16_t *index, const int16_t *value, int count, int32_t *out)
{
STEP_LAYERS
    write_output(state, out);
#ifdef MODEL_COUNTERS
    ++state->steps;
#endif
    return 0;
}

int model_step(model_state *state, const int16_t *x, int32_t *out)
{
    int count = 0, j;
    for (j = 0; j < MODEL_INPUTS; ++j)
        if (x[j] != 0) {
            state->work.input_index[count] = (uint16_t)j;
            state->work.input_value[count++] = x[j];
        }
    return step_checked(state, state->work.input_index, state->work.input_value, count, out);
}

int model_step_events(model_state *state, const uint16_t *index, const int16_t *value, int count, int32_t *out)
{
    int k, next = 0;
    for (k = 0; k < count; ++k) {
        if (index[k] < next || index[k] >= MODEL_INPUTS)
            return MODEL_ERROR_INPUT;
        next = index[k] + 1;
    }
    return count < 0 ? MODEL_ERROR_INPUT : step_checked(state, index, value, count, out);
}
#if TOKENS

int model_step_token(model_state *state, int32_t token, int32_t *out)
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
            state->trace[j] = 0;
    }
#endif
#if MEAN
    state->trace_steps = 0;
#endif
}

int model_events(const model_state *state, int layer, const uint16_t **index, const int16_t **value)
{
    switch (layer) {
EVENTS_OF_LAYERS
    default:
        return MODEL_ERROR_INPUT;
    }
}

BYTE_FUNCTIONS

/* Write c, then y from the list of events. */
static uint8_t *put_layer(uint8_t *to, const int16_t *c, const uint16_t *index, const int16_t *value, int count,
                          int hidden)
{
    int j;
    for (j = 0; j < hidden; ++j)
        to = put(to, (uint16_t)c[j], 2);
    for (j = 0; j < hidden; ++j)
        to = put(to, 0, 2);
    for (j = 0; j < count; ++j)
        (void)put(to - 2 * (hidden - index[j]), (uint16_t)value[j], 2);
    return to;
}

static int16_t get_state(const uint8_t *from)
{
    const int32_t bits = (int32_t)get(from, 2);
    return (int16_t)(bits < 32768 ? bits : bits - 65536);
}

static int get_layer(const uint8_t *from, int16_t *c, uint16_t *index, int16_t *value, int hidden)
{
    int count = 0, j;
    for (j = 0; j < hidden; ++j)
        c[j] = get_state(from + 2 * j);
    for (j = 0; j < hidden; ++j) {
        const int16_t y = get_state(from + 2 * (hidden + j));
        if (y != 0) {
            index[count] = (uint16_t)j;
            value[count++] = y;
        }
    }
    return count;
}
#if SPARSE_Y_ANY

static void spread(int16_t *y, const uint16_t *index, const int16_t *value, int count, int hidden)
{
    int k;
    clear_state(y, hidden);
    for (k = 0; k < count; ++k)
        y[index[k]] = value[k];
}
#endif

void model_save(const model_state *state, uint8_t *saved)
{
    saved = put(saved, 0x55524745u, 4);
    saved = put(saved, MODEL_FINGERPRINT, 4);
SAVE_LAYERS
#if TRACE
    {
        int j;
        for (j = 0; j < MODEL_OUTPUTS; ++j)
            saved = put(saved, (uint64_t)state->trace[j], 8);
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
#if TRACE
    int j;
#endif
    if (get(saved, 4) != 0x55524745u || get(saved + 4, 4) != MODEL_FINGERPRINT)
        return MODEL_ERROR_SAVED;
    saved += 8;
#if MEAN
    if (get(saved + SAVED_LAYERS + 8 * MODEL_OUTPUTS, 8) >> 62 != 0)
        return MODEL_ERROR_SAVED;
#endif
#if TRACE
    for (j = 0; j < MODEL_OUTPUTS; ++j) {
        const int64_t trace = (int64_t)get(saved + SAVED_LAYERS + 8 * j, 8);
        if (trace > TRACE_MAX || trace < -TRACE_MAX)
            return MODEL_ERROR_SAVED;
    }
#endif
RESTORE_LAYERS
#if TRACE
    for (j = 0; j < MODEL_OUTPUTS; ++j, saved += 8)
        state->trace[j] = (int64_t)get(saved, 8);
#endif
#if MEAN
    state->trace_steps = (int64_t)get(saved, 8);
#endif
    return 0;
}
