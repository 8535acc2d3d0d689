
/* Layer LAYER: the next state of a unit. */
static inline int32_t next_LAYER(const model_state *state, int j, int32_t update, int32_t candidate)
{
    enum { fraction = FRACTION };
    const int32_t c = state->c_LAYER[j], target = shift_right(candidate, 15 - fraction);
#if HARD
    const int32_t memory = state->y_LAYER[j] != 0 ? CLAMP(c - shift_right(rho_LAYER[j] * c, 12), 15) : c;
#else
    const int32_t memory = c;
#endif
    int32_t next = memory + shift_right(update * target - update * memory, 15); /* between memory and target */
#if OUTPUT
    next = CLAMP(next - shift_right(rho_LAYER[j] * state->y_LAYER[j], 12), 15);
#endif
#if KEEP
    next += shift_right(KEEP_VALUE * (c - next), 15);
#endif
    return next;
}

/* Read a list of active inputs, update the units, write the list of events. */
static void step_LAYER(model_state *state, const uint16_t *index, const int16_t *value, int count)
{
    enum { hidden = HIDDEN };
#if AFTER
    int32_t *sum = state->work.sum + hidden; /* after the block of q, the recurrent part of z */
#else
    int32_t *sum = state->work.sum;
#endif
    const int32_t *r = sum, *u = sum + hidden, *z = sum + 2 * hidden;
    const uint16_t *active = state->index_LAYER;
    const int16_t *active_value = state->value_LAYER;
    const int active_count = state->count_LAYER;
    uint8_t *fired = (uint8_t *)state->work.fired;
    int next_count = 0, events, j, k;
#ifdef MODEL_COUNTERS
    state->macs += 3u * hidden * ((uint64_t)count + (uint64_t)active_count + 1u);
#endif
    ADD_INPUTS;
#if AFTER
    copy(sum - hidden, bias_q_LAYER, hidden);
    ADD_RECURRENT;
#else
    ADD_RECURRENT;
    apply_reset_gate(state->work.gated, r, active, active_value, active_count);
    ADD_GATED;
#endif
#if MODEL_BATCHES
    for (k = 0; k < hidden; k += batch) {
        const int n = hidden - k < batch ? hidden - k : batch;
        int16_t update[batch], candidate[batch];
#if AFTER
        int32_t a[batch];
        look_up(update, sigmoid_table, r + k, n);
        apply_reset(a, z + k, sum - hidden + k, update, n);
        look_up(candidate, tanh_table, a, n);
#else
        look_up(candidate, tanh_table, z + k, n);
#endif
        look_up(update, sigmoid_table, u + k, n);
        for (j = 0; j < n; ++j)
            state->c_LAYER[k + j] = (int16_t)next_LAYER(state, k + j, update[j], candidate[j]);
    }
#else
    for (j = 0; j < hidden; ++j) {
#if AFTER
        const int32_t a = z[j] + (int32_t)(((int64_t)interpolate(sigmoid_table, r[j]) * sum[j - hidden]) >> 16);
#else
        const int32_t a = z[j];
#endif
        state->c_LAYER[j] = (int16_t)next_LAYER(state, j, interpolate(sigmoid_table, u[j]), interpolate(tanh_table, a));
    }
#endif
    for (j = 0; j < hidden; ++j)
        fired[j] = state->c_LAYER[j] > theta_LAYER[j];
    events = list_fired(state->work.fired, hidden, state->index_LAYER);
#if SPARSE_Y
    clear_state(state->y_LAYER, hidden);
#endif
    for (k = 0; k < events; ++k) {
        j = state->index_LAYER[k];
        const int16_t next = state->c_LAYER[j];
        if (next != 0) { /* a zero is an event, but adds nothing to a sum */
            state->index_LAYER[next_count] = (uint16_t)j;
            state->value_LAYER[next_count++] = next;
        }
#if SPARSE_Y
        state->y_LAYER[j] = next;
#endif
#if THRESHOLD
        state->c_LAYER[j] = (int16_t)CLAMP(next - shift_right(rho_LAYER[j] * theta_LAYER[j], 12), 15);
#endif
    }
    state->count_LAYER = next_count;
#ifdef MODEL_COUNTERS
    state->events[LAYER] += (uint64_t)events;
#endif
}
