
/* Layer LAYER: read a list of active inputs, update the units, write the list of events. Returns 0 if a state is not
 * finite. */
static int step_LAYER(model_state *state, const uint16_t *index, const float *value, int count)
{
    enum { hidden = HIDDEN };
#if AFTER
    float *sum = state->work.sum + hidden; /* after the block of q, the recurrent part of z */
#else
    float *sum = state->work.sum;
#endif
    const float *r = sum, *u = sum + hidden, *z = sum + 2 * hidden;
    float *c = state->c_LAYER;
    float zero = 0.0f; /* stays zero unless a state is not finite */
    int events = 0, active = 0, j;
#if BEFORE
    int k;
#endif
#ifdef MODEL_COUNTERS
    state->macs += 3u * hidden * ((uint64_t)count + (uint64_t)state->count_LAYER + 1u);
#endif
    copy(sum, bias_LAYER, 3 * hidden);
    ADD_INPUTS;
#if AFTER
    copy(sum - hidden, bias_q_LAYER, hidden);
    ADD_RECURRENT;
#else
    ADD_RECURRENT;
    for (k = 0; k < state->count_LAYER; ++k)
        state->work.gated[k] = sigmoid(r[state->index_LAYER[k]]) * state->value_LAYER[k];
    ADD_GATED;
#endif
    for (j = 0; j < hidden; ++j) {
#if AFTER
        const float a = sigmoid(r[j]) * sum[j - hidden] + z[j];
#else
        const float a = z[j];
#endif
#if HARD
        const float memory = -rho_LAYER[j] * (state->y_LAYER[j] != 0.0f ? c[j] : 0.0f) + c[j];
#else
        const float memory = c[j];
#endif
        /* update = 1 / (1 + exp(u)) and candidate = tanh(a) share one division. */
        const float eu = 1.0f + exponential(u[j]), ez = exponential(-2.0f * a);
        const float both = 1.0f / (eu * (1.0f + ez));
        const float update = (1.0f + ez) * both, candidate = (1.0f - ez) * eu * both;
        float next = update * (candidate - memory) + memory;
#if OUTPUT
        next = -rho_LAYER[j] * state->y_LAYER[j] + next;
#endif
#if KEEP
        next = KEEP_VALUE * (c[j] - next) + next;
#endif
        c[j] = next;
    }
    for (j = 0; j < hidden; ++j) {
        const float next = c[j];
        zero += next - next;
#if DENSE_Y
        state->y_LAYER[j] = 0.0f;
#endif
        if (next > theta_LAYER[j]) {
            ++events;
            if (next != 0.0f) { /* a zero is an event, but adds nothing to a sum */
                state->index_LAYER[active] = (uint16_t)j;
                state->value_LAYER[active++] = next;
            }
#if DENSE_Y
            state->y_LAYER[j] = next;
#endif
#if THRESHOLD
            c[j] = -rho_LAYER[j] * theta_LAYER[j] + next;
#endif
        }
    }
    state->count_LAYER = active;
#ifdef MODEL_COUNTERS
    state->events[LAYER] += (uint64_t)events;
#else
    (void)events;
#endif
    return zero == 0.0f;
}
