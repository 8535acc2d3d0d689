
/* Layer LAYER. `sum` has the blocks GATE_BLOCKS, one value per unit. */
enum { hidden_LAYER = HIDDEN };
#if DELTA

/* Add the products with the layer's own output to `sum`, which holds those with its input. */
static void recurrent_LAYER(model_state *state, const uint16_t *active, const float *active_value, int active_count,
                            float *sum)
{
    enum { hidden = HIDDEN };
    float *total = state->recurrent_LAYER;
    int j;
    ADD_RECURRENT;
#if AFTER
    copy(sum - hidden, total, hidden);
    for (j = 0; j < 2 * hidden; ++j)
        sum[j] = sum[j] + total[hidden + j];
#else
    for (j = 0; j < GATES * hidden; ++j)
        sum[j] = sum[j] + total[j];
#endif
}
#endif

/* Compare the states with the thresholds and write the list of events. Returns the number of events, or -1 if a state
 * is not finite. */
static int emit_LAYER(model_state *state)
{
    enum { hidden = HIDDEN };
    float *c = state->c_LAYER;
    uint8_t *fired = (uint8_t *)state->work.fired;
    uint16_t *index = state->index_LAYER;
#if LSTM
    const float *output = state->work.sum + 3 * hidden;
#endif
    int events, active = 0, j, k;
    UNROLLED for (j = 0; j < hidden; ++j) {
#if COMPARE_OUTPUT
        const float value = output[j];
#else
        const float next = c[j];
#endif
#if DELTA
        const float change = COMPARED - state->y_LAYER[j];
#endif
        fired[j] = IS_EVENT > theta_LAYER[j];
    }
    events = list_fired(state->work.fired, hidden, index);
#if SPARSE_Y
    clear(state->y_LAYER, hidden);
#endif
    if (!are_finite(c, hidden))
        return -1;
    for (k = 0; k < events; ++k) {
#if LSTM
        const float value = output[index[k]];
#else
        const float value = c[index[k]];
#endif
        j = index[k];
#if DELTA
        state->value_LAYER[active++] = COMPARED_VALUE - state->y_LAYER[j];
#else
#if THRESHOLD
#if SIGNED
        c[j] = -rho_LAYER[j] * (COMPARED_VALUE < 0.0f ? -theta_LAYER[j] : theta_LAYER[j]) + c[j];
#else
        c[j] = -rho_LAYER[j] * theta_LAYER[j] + c[j];
#endif
#endif
        if (value != 0.0f) { /* a zero is an event, but adds nothing to a sum */
            index[active] = (uint16_t)j;
            state->value_LAYER[active++] = value;
        }
#endif
#if DENSE_Y
        state->y_LAYER[j] = value;
#endif
    }
    state->count_LAYER = active;
#ifdef MODEL_COUNTERS
    state->events[LAYER] += (uint64_t)events;
#endif
    return events;
}

/* Read a list of active inputs, update the units, write the list of events. Returns as emit_LAYER. */
static int step_LAYER(model_state *state, const uint16_t *index, const float *value, int count)
{
    enum { hidden = HIDDEN };
    float *sum = state->work.sum + FIRST_SUM * hidden;
#if LSTM
    float *output = sum + 3 * hidden;
    const float *f = sum + hidden;
#else
    const float *r = sum, *u = sum + hidden, *z = sum + 2 * hidden;
#endif
    const uint16_t *active = state->index_LAYER;
    const float *active_value = state->value_LAYER;
    int active_count = state->count_LAYER, j;
    float *c = state->c_LAYER;
    const float limit = LARGEST_ARGUMENT;
#if RECEIVES
    if (state->age == 0) { /* compute the sums from the outputs, not from their changes */
        copy(state->received_LAYER, bias_LAYER, GATES * hidden);
        index = state->work.held_index;
        value = state->work.held_value;
        count = list_held(state->y_BELOW, hidden_BELOW, state->work.held_index, state->work.held_value);
    }
    ADD_INPUTS;
    copy(sum, state->received_LAYER, GATES * hidden);
#else
    ADD_INPUTS;
#endif
#if DELTA
    if (state->age == 0) {
        clear(state->recurrent_LAYER, GATES * hidden);
#if AFTER
        copy(state->recurrent_LAYER, bias_q_LAYER, hidden);
#endif
        active = state->work.held_index;
        active_value = state->work.held_value;
        active_count = list_held(state->y_LAYER, hidden, state->work.held_index, state->work.held_value);
    }
    recurrent_LAYER(state, active, active_value, active_count, sum);
#else
#if AFTER
    copy(sum - hidden, bias_q_LAYER, hidden);
#endif
    ADD_RECURRENT;
#endif
#if BEFORE
    apply_reset_gate(state->work.gated, r, active, active_value, active_count);
    ADD_GATED;
#endif
#ifdef MODEL_COUNTERS
    state->macs += (uint64_t)GATES * hidden * ((uint64_t)count + (uint64_t)active_count + 1u);
#endif
    for (j = 0; j < hidden; ++j) {
#if HARD
        const float memory = -rho_LAYER[j] * (state->y_LAYER[j] != 0.0f ? c[j] : 0.0f) + c[j];
#else
        const float memory = c[j];
#endif
#if LSTM
        const float added = sigmoid(sum[j], limit) * hyperbolic_tangent(sum[2 * hidden + j], limit);
        float next = sigmoid(f[j], limit) * memory + added;
#else
#if AFTER
        const float a = sigmoid(r[j], limit) * sum[j - hidden] + z[j];
#else
        const float a = z[j];
#endif
        const gru_gates g = compute_gates(u[j], a, limit);
        float next = g.update * (g.candidate - memory) + memory;
#endif
#if OUTPUT
        next = -rho_LAYER[j] * state->y_LAYER[j] + next;
#endif
#if KEEP
        next = KEEP_VALUE * (c[j] - next) + next;
#endif
#if LSTM
        output[j] = sigmoid(output[j], limit) * hyperbolic_tangent(next, limit);
#endif
        c[j] = next;
    }
    return emit_LAYER(state);
}
#if SKIP

/* Compute the gates of a step without input and without events into `sum`: GRU update and candidate, LSTM forget gate,
 * input and output gate. */
static void settle_LAYER(model_state *state)
{
    enum { hidden = HIDDEN };
    const float limit = LARGEST_ARGUMENT;
    float *sum = state->work.sum + FIRST_SUM * hidden;
    int j;
#if RECEIVES
    copy(sum, state->received_LAYER, GATES * hidden);
#else
    copy(sum, bias_LAYER, GATES * hidden);
#endif
#if DELTA
    recurrent_LAYER(state, NULL, NULL, 0, sum);
#else
#if AFTER
    copy(sum - hidden, bias_q_LAYER, hidden);
#endif
#endif
    for (j = 0; j < hidden; ++j) {
#if LSTM
        sum[2 * hidden + j] = sigmoid(sum[j], limit) * hyperbolic_tangent(sum[2 * hidden + j], limit);
        sum[hidden + j] = sigmoid(sum[hidden + j], limit);
        sum[3 * hidden + j] = sigmoid(sum[3 * hidden + j], limit);
#else
#if AFTER
        const float a = sigmoid(sum[j], limit) * sum[j - hidden] + sum[2 * hidden + j];
#else
        const float a = sum[2 * hidden + j];
#endif
        const gru_gates g = compute_gates(sum[hidden + j], a, limit);
        sum[hidden + j] = g.update;
        sum[2 * hidden + j] = g.candidate;
#endif
    }
}

/* The constants of a unit's relaxation, from the gates of settle_LAYER. */
static inline relaxation relaxation_LAYER(const model_state *state, int j)
{
    enum { hidden = HIDDEN };
    const float *sum = state->work.sum + FIRST_SUM * hidden;
#if LSTM
    return lstm_relaxation(sum[hidden + j], sum[2 * hidden + j], 1.0 - (double)KEEP_VALUE);
#else
    return gru_relaxation(sum[hidden + j], sum[2 * hidden + j], 1.0 - (double)KEEP_VALUE);
#endif
}

/* Whether a unit with state `next` has an event. */
static inline int fires_LAYER(const model_state *state, int j, float next)
{
#if COMPARE_OUTPUT
    const float value = state->work.sum[3 * hidden_LAYER + j] * hyperbolic_tangent(next, LARGEST_ARGUMENT);
#endif
#if DELTA
    const float change = COMPARED - state->y_LAYER[j];
#endif
    (void)state;
    return IS_EVENT > theta_LAYER[j];
}

/* The first step, 1 to `limit`, at which a unit has an event, or limit + 1. */
static int64_t first_event_LAYER(model_state *state, int64_t limit)
{
    int j;
    settle_LAYER(state);
    for (j = 0; j < hidden_LAYER && limit > 0; ++j) {
        const relaxation r = relaxation_LAYER(state, j);
        const float c = state->c_LAYER[j];
        /* States are monotone in time. If neither the current nor the last one exceeds the threshold, none does. If the
         * last one does and that of the first step does not, there is a single first step in between. */
        const int last = fires_LAYER(state, j, relaxed(r, limit, c));
        if (!last && !fires_LAYER(state, j, c))
            continue;
        if (fires_LAYER(state, j, relaxed(r, 1, c)))
            return 1;
        if (last) {
            int64_t before = 1, at = limit;
            while (at - before > 1) {
                const int64_t middle = before + (at - before) / 2;
                if (fires_LAYER(state, j, relaxed(r, middle, c)))
                    at = middle;
                else
                    before = middle;
            }
            limit = at - 1;
        }
    }
    return limit + 1;
}

/* Advance the states by steps without input and events. */
static void relax_LAYER(model_state *state, int64_t steps)
{
    int j;
    settle_LAYER(state);
    for (j = 0; j < hidden_LAYER; ++j)
        state->c_LAYER[j] = relaxed(relaxation_LAYER(state, j), steps, state->c_LAYER[j]);
}

/* The same, and compare the states with the thresholds at the last step. Returns as emit_LAYER. */
static int advance_LAYER(model_state *state, int64_t steps)
{
#if LSTM
    float *output = state->work.sum + 3 * hidden_LAYER;
    int j;
#endif
    relax_LAYER(state, steps);
#if LSTM
    for (j = 0; j < hidden_LAYER; ++j)
        output[j] = output[j] * hyperbolic_tangent(state->c_LAYER[j], LARGEST_ARGUMENT);
#endif
#ifdef MODEL_COUNTERS
    state->macs += (uint64_t)GATES * hidden_LAYER;
#endif
    return emit_LAYER(state);
}
#endif
