
/* Layer LAYER: read a list of active inputs, update the units, write the list of events. */
static void step_LAYER(model_state *state, const uint16_t *index, const int16_t *value, int count)
{
    enum { hidden = HIDDEN, fraction = FRACTION };
#if AFTER
    int32_t *sum = state->work.sum + hidden; /* after the block of q, the recurrent part of z */
#else
    int32_t *sum = state->work.sum;
#endif
    const int32_t *r = sum, *u = sum + hidden, *z = sum + 2 * hidden;
    const uint16_t *active = state->index_LAYER;
    const int16_t *active_value = state->value_LAYER;
    const int active_count = state->count_LAYER;
    int next_count = 0, events = 0, j;
#ifdef MODEL_COUNTERS
    state->macs += 3u * hidden * ((uint64_t)count + (uint64_t)active_count + 1u);
#endif
    ADD_INPUTS;
#if AFTER
    copy(sum - hidden, bias_q_LAYER, hidden);
    ADD_RECURRENT;
#else
    ADD_RECURRENT;
    for (j = 0; j < active_count; ++j)
        state->work.gated[j] = (int16_t)shift_right(sigmoid(r[active[j]]) * active_value[j], 15);
    ADD_GATED;
#endif
    for (j = 0; j < hidden; ++j) {
        const int32_t c = state->c_LAYER[j];
#if AFTER
        const int32_t a = z[j] + (int32_t)shift_right_long((int64_t)sigmoid(r[j]) * sum[j - hidden], 15);
#else
        const int32_t a = z[j];
#endif
        const int32_t update = sigmoid(-u[j]), candidate = shift_right(hyperbolic_tangent(a), 15 - fraction);
#if HARD
        const int32_t memory =
            state->y_LAYER[j] != 0 ? CLAMP(c - shift_right(rho_LAYER[j] * c, 12), 15) : c;
#else
        const int32_t memory = c;
#endif
        int32_t next = memory + shift_right(update * (candidate - memory), 15);
#if OUTPUT
        next -= shift_right(rho_LAYER[j] * state->y_LAYER[j], 12);
#endif
#if KEEP
        next += shift_right(KEEP_VALUE * (c - CLAMP(next, 15)), 15);
#endif
        next = CLAMP(next, 15);
#if SPARSE_Y
        state->y_LAYER[j] = 0;
#endif
        if (next > theta_LAYER[j]) {
            ++events;
            if (next != 0) { /* a zero is an event, but adds nothing to a sum */
                state->index_LAYER[next_count] = (uint16_t)j;
                state->value_LAYER[next_count++] = (int16_t)next;
            }
#if SPARSE_Y
            state->y_LAYER[j] = (int16_t)next;
#endif
#if THRESHOLD
            next = CLAMP(next - shift_right(rho_LAYER[j] * theta_LAYER[j], 12), 15);
#endif
        }
        state->c_LAYER[j] = (int16_t)next;
    }
    state->count_LAYER = next_count;
#ifdef MODEL_COUNTERS
    state->events[LAYER] += (uint64_t)events;
#else
    (void)events;
#endif
}
