
/* total[j] += value * row[j] for every entry of a sparse vector. Sums fit: the export checked the weights. */
static void accumulate_TYPE(int32_t *restrict total, int columns, const TYPE_t *rows, size_t stride,
                            const uint16_t *index, const int16_t *value, int count, int drop)
{
    int k = 0, j;
    for (; k + 4 <= count; k += 4) {
        const TYPE_t *a = rows + index[k] * stride, *b = rows + index[k + 1] * stride;
        const TYPE_t *c = rows + index[k + 2] * stride, *d = rows + index[k + 3] * stride;
        const int16_t va = (int16_t)shift_right(value[k], drop), vb = (int16_t)shift_right(value[k + 1], drop);
        const int16_t vc = (int16_t)shift_right(value[k + 2], drop), vd = (int16_t)shift_right(value[k + 3], drop);
        for (j = 0; j < columns; ++j)
            total[j] += va * a[j] + vb * b[j] + vc * c[j] + vd * d[j];
    }
    for (; k < count; ++k) {
        const TYPE_t *a = rows + index[k] * stride;
        const int16_t va = (int16_t)shift_right(value[k], drop);
        for (j = 0; j < columns; ++j)
            total[j] += va * a[j];
    }
}
#if SCALED

/* The same, multiplied by scale[j] / 2^shift and added to pre-activations. */
static void add_rows_TYPE(int32_t *restrict sum, int columns, const TYPE_t *rows, size_t stride, const int32_t *scale,
                          int shift, const uint16_t *index, const int16_t *value, int count, int drop)
{
    enum { tile = 128 };
    int32_t total[tile];
    int first, j;
    if (count == 0)
        return;
    for (first = 0; first < columns; first += tile) {
        const int n = columns - first < tile ? columns - first : tile;
        clear(total, n);
        accumulate_TYPE(total, n, rows + first, stride, index, value, count, drop);
        for (j = 0; j < n; ++j)
            sum[first + j] += (int32_t)shift_right_long((int64_t)total[j] * scale[first + j], shift);
    }
}
#endif
