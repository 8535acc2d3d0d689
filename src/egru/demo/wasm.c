/* The exported network as a WebAssembly module: one state, one pixel per call. */
#define MODEL_COUNTERS
#include "model.c"

#define EXPORT(name) __attribute__((export_name(name)))

static model_state state;
static float scores[MODEL_OUTPUTS];

void *memset(void *to, int byte, size_t size)
{
    unsigned char *p = to;
    while (size-- > 0)
        *p++ = (unsigned char)byte;
    return to;
}

void *memcpy(void *restrict to, const void *restrict from, size_t size)
{
    unsigned char *p = to;
    const unsigned char *q = from;
    while (size-- > 0)
        *p++ = *q++;
    return to;
}

EXPORT("reset") void demo_reset(void)
{
    model_reset(&state);
    state.macs = 0;
}

/* Read a pixel. Returns the number of events; the buffers below then describe the step. */
EXPORT("step") int demo_step(float pixel)
{
    const uint16_t *index;
    const float *value;
    return model_step(&state, &pixel, scores) == 0 ? model_events(&state, 0, &index, &value) : -1;
}

EXPORT("event_index") const uint16_t *demo_event_index(void)
{
    const uint16_t *index;
    const float *value;
    (void)model_events(&state, 0, &index, &value);
    return index;
}

EXPORT("event_value") const float *demo_event_value(void)
{
    const uint16_t *index;
    const float *value;
    (void)model_events(&state, 0, &index, &value);
    return value;
}

EXPORT("scores") const float *demo_scores(void)
{
    return scores;
}

/* Multiply-accumulates since the last reset. */
EXPORT("macs") double demo_macs(void)
{
    return (double)state.macs;
}
