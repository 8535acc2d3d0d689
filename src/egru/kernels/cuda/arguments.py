"""Kernel arguments: one field table per struct, from which the CUDA and the Python side are both generated.

A kernel receives a single struct. Its table below lists every field with its C++ type. The table yields the C++
definition that :mod:`egru.kernels.cuda.sources` puts in front of the kernel, and the packer that fills the struct
(:mod:`egru.kernels.cuda.structs`).
To add an argument, add a row here and pass its value where the kernel is launched.

Sizes in the comments: ``T`` steps, ``B`` sequences, ``H`` units, ``HP`` units rounded up to a multiple of 8, ``I``
input features, ``IP`` features rounded up to a multiple of 8. A pointer is null (0 in Python) if the value is absent.
"""

from egru.kernels.cuda.structs import ArgumentStruct

KEEP = ArgumentStruct(
    "Keep",  # zoneout: a (T, B, H) array by strides
    [("p", "const float*"), ("t", "i64"), ("b", "i64"), ("h", "i64")],
)

SURROGATE = ArgumentStruct(
    "Surrogate",  # the triangular pseudo-derivative
    [("inverse_width", "float"), ("height", "float"), ("bounded", "int")],
)

STEP_FORWARD = ArgumentStruct(
    "StepForward",  # stepwise.cu: one step
    [
        ("projected", "const float*"),  # (T, B, 3, HP): x W without bias
        ("product", "const float*"),  # (B, 3 HP): y V; "before": (B, 2 HP) for r and u, then (B, HP) for z
        ("bias_ih", "const float*"),
        ("bias_hh", "const float*"),
        ("theta", "const float*"),
        ("rho", "const float*"),
        ("keep", KEEP),
        ("lengths", "const i64*"),
        ("c_last", "float*"),  # (B, H), updated in place, as are the next two
        ("y_last", "float*"),
        ("fired", "unsigned char*"),
        ("operand", "Operand*"),  # (B, HP): the input of the next product
        ("y", "float*"),  # (T, B, H)
        ("c", "float*"),  # (T, B, H)
        ("gate_r", "float*"),  # (B, H), "before" only
        ("gate_u", "float*"),  # (B, H), "before" only
        ("reserve", "Reserve*"),  # see reserve.cuh; null if nothing is saved
        ("T", "int"),
        ("t", "int"),
        ("B", "int"),
        ("H", "int"),
        ("HP", "int"),
    ],
)

STEP_BACKWARD = ArgumentStruct(
    "StepBackward",  # stepwise.cu: one step
    [
        ("c", "const float*"),  # (T, B, H)
        ("c0", "const float*"),  # (B, H)
        ("y0", "const float*"),  # (B, H)
        ("reserve", "const Reserve*"),
        ("grad_y", "const float*"),
        ("grad_c", "const float*"),
        ("product", "const float*"),  # (B, HP): the gradient through the weights; null at the last step
        ("theta", "const float*"),
        ("rho", "const float*"),
        ("keep", KEEP),
        ("lengths", "const i64*"),
        ("dc", "float*"),  # (B, H), updated in place, as are the next three
        ("dy", "float*"),  # the element-wise path only
        ("de", "float*"),
        ("dtheta", "float*"),
        ("gates", "Operand*"),  # (T, B, 4, HP): the gradient that multiplies V_z, then a_r, a_u, a_z
        ("source", "Operand*"),  # (T, B, HP): y of the previous step
        ("source_z", "Operand*"),  # (T, B, HP): r times y of the previous step, "before" only
        ("surrogate", SURROGATE),
        ("T", "int"),
        ("t", "int"),
        ("B", "int"),
        ("H", "int"),
        ("HP", "int"),
    ],
)

LSTM_FORWARD = ArgumentStruct(
    "LstmForward",  # lstm_steps.cu: one step
    [
        ("projected", "const float*"),  # (T, B, 4, HP): x W without bias, gates i, f, g, o
        ("product", "const float*"),  # (B, 4, HP): y V
        ("bias_ih", "const float*"),
        ("bias_hh", "const float*"),
        ("theta", "const float*"),
        ("rho", "const float*"),
        ("keep", KEEP),
        ("lengths", "const i64*"),
        ("c_last", "float*"),  # (B, H), updated in place, as are the next two
        ("y_last", "float*"),
        ("fired", "unsigned char*"),
        ("operand", "Operand*"),  # (B, HP): the input of the next product
        ("y", "float*"),  # (T, B, H)
        ("c", "float*"),  # (T, B, H): what was compared with the threshold
        ("reserve", "float*"),  # see lstm.cuh; null if nothing is saved
        ("T", "int"),
        ("t", "int"),
        ("B", "int"),
        ("H", "int"),
        ("HP", "int"),
    ],
)

LSTM_BACKWARD = ArgumentStruct(
    "LstmBackward",  # lstm_steps.cu: one step
    [
        ("c", "const float*"),  # (T, B, H): what was compared with the threshold
        ("c0", "const float*"),  # (B, H)
        ("y0", "const float*"),  # (B, H)
        ("reserve", "const float*"),
        ("grad_y", "const float*"),
        ("grad_c", "const float*"),
        ("product", "const float*"),  # (B, HP): the gradient through the weights; null at the last step
        ("theta", "const float*"),
        ("rho", "const float*"),
        ("keep", KEEP),
        ("lengths", "const i64*"),
        ("dc", "float*"),  # (B, H), updated in place, as are the next three
        ("dy", "float*"),  # the element-wise path only
        ("de", "float*"),
        ("dtheta", "float*"),
        ("gates", "Operand*"),  # (T, B, 4, HP): gradients of the pre-activations
        ("source", "Operand*"),  # (T, B, HP): y of the previous step
        ("surrogate", SURROGATE),
        ("T", "int"),
        ("t", "int"),
        ("B", "int"),
        ("H", "int"),
        ("HP", "int"),
    ],
)

SEQUENCE_FORWARD = ArgumentStruct(
    "SequenceForward",  # forward.cu
    [
        ("projected", "const float*"),  # (T, B, 3, HP): x W without bias; null if the input has one feature
        ("input", "const float*"),  # (T, B), only if the input has one feature
        ("weight_ih", "const float*"),  # (3 H,), only if the input has one feature
        ("weights", "const char*"),  # packed recurrent weights, see pack.py
        ("bias_ih", "const float*"),
        ("bias_hh", "const float*"),
        ("theta", "const float*"),
        ("rho", "const float*"),
        ("c0", "const float*"),
        ("y0", "const float*"),
        ("keep", KEEP),
        ("lengths", "const i64*"),
        ("exchange", "char*"),  # see group.cuh
        ("counter", "u32*"),  # the groups' barriers
        ("y", "float*"),
        ("c", "float*"),
        ("c_last", "float*"),
        ("y_last", "float*"),
        ("reserve", "Reserve*"),  # see reserve.cuh; null if nothing is saved
        ("error", "int*"),  # set to 1 by a kernel that timed out
        ("T", "int"),
        ("B", "int"),
        ("b0", "int"),  # the first sequence of this launch
        ("state_stride", "int"),  # between rows of c0 and y0: H, or 0 if all rows share one
    ],
)

SMALL_BATCH = ArgumentStruct(
    "SmallBatch",  # small_batch.cu
    [
        ("projected", "const float*"),  # (T, B, 3, STRIDE): x W without bias; null if the input has one feature
        ("input", "const float*"),  # (T, B), used if the input has one feature
        ("weight_ih", "const float*"),  # (3 H,), used if the input has one feature
        ("weights", "const float*"),  # (3 H, H), recurrent, as in torch
        ("bias_ih", "const float*"),
        ("bias_hh", "const float*"),
        ("theta", "const float*"),
        ("rho", "const float*"),
        ("c0", "const float*"),
        ("y0", "const float*"),
        ("keep", KEEP),
        ("lengths", "const i64*"),
        ("exchange", "u64*"),  # [2][group][word][unit], zero at the start
        ("y", "float*"),
        ("c", "float*"),
        ("c_last", "float*"),
        ("y_last", "float*"),
        ("reserve", "Reserve*"),  # see reserve.cuh; null if nothing is saved
        ("error", "int*"),  # set to 1 by a kernel that timed out
        ("T", "int"),
        ("B", "int"),
        ("b0", "int"),  # the first sequence of this launch
        ("state_stride", "int"),  # between rows of c0 and y0: H, or 0 if all rows share one
    ],
)

SEQUENCE_BACKWARD = ArgumentStruct(
    "SequenceBackward",  # backward.cu
    [
        ("c", "const float*"),
        ("c0", "const float*"),
        ("y0", "const float*"),
        ("reserve", "const Reserve*"),
        ("grad_y", "const float*"),
        ("grad_c", "const float*"),
        ("grad_c_last", "const float*"),
        ("grad_y_last", "const float*"),
        ("input", "const float*"),  # (T, B), only if the input has one feature
        ("weights", "const char*"),  # packed recurrent weights, see pack.py
        ("theta", "const float*"),
        ("rho", "const float*"),
        ("keep", KEEP),
        ("lengths", "const i64*"),
        ("exchange", "char*"),  # see group.cuh
        ("counter", "u32*"),  # the groups' barriers
        # Low precision, two values per word. The fourth block of `gates` is written only if GRAD_INPUT, that is if a
        # product over time reads it.
        ("gates", "u32*"),  # (T, B, 4, HP): the gradient that multiplies V_z, then a_r, a_u, a_z
        ("source", "u32*"),  # (T, B, HP + 8): y of the previous step, 1, the input of a one-feature layer, zeros
        ("source_z", "u32*"),  # (T, B, HP): r times y of the previous step, "before" only
        ("dc0", "float*"),
        ("dy0", "float*"),
        ("sums", "float*"),  # (groups * 8 warps, SUMS, HP)
        ("error", "int*"),  # set to 1 by a kernel that timed out
        ("surrogate", SURROGATE),
        ("T", "int"),
        ("B", "int"),
        ("b0", "int"),  # the first sequence of this launch
        ("group0", "int"),  # the first group of this launch
        ("state_stride", "int"),  # between rows of c0 and y0: H, or 0 if all rows share one
    ],
)

PACK = ArgumentStruct(
    "Pack",
    [
        ("weight", "const float*"),  # (3, H, H)
        ("out", "uint4*"),
        ("H", "int"),
        ("k_chunks", "int"),  # k8-chunks of one gate
        ("multiple", "int"),  # k8-chunks are padded to a multiple of this
        ("tiles", "int"),
        ("blocks", "int"),
        ("after", "int"),
    ],
)

PAD = ArgumentStruct(
    "Pad",
    [
        ("in", "const float*"),  # (blocks, rows, columns)
        ("out", "uint4*"),  # (blocks, rows_out, columns_out) in low precision, padded with zeros
        ("blocks", "int"),
        ("rows", "int"),
        ("columns", "int"),
        ("rows_out", "int"),
        ("columns_out", "int"),
    ],
)

PREPARE = ArgumentStruct(
    "Prepare",  # prepare.cu
    [
        ("pack", PACK),  # no blocks if the weights stay as they are
        ("input", PAD),  # null if no product needs it
        ("weight_ih", PAD),  # null if no product needs it
        ("workspace", "uint4*"),  # set to zero
        ("words", "i64"),  # of 16 bytes
        ("backward", "int"),
    ],
)

GATHER = ArgumentStruct(
    "Gather",  # gather.cu
    [
        ("hh", "const float*"),  # (3 or 2, HP, width): V_z ("after" only), r, u; columns: V, sums, inputs
        ("hh_z", "const float*"),  # (HP, HP), "before" only
        ("ih", "const float*"),  # (3, HP, IP); null if there is nothing to gather
        ("sums", "const float*"),  # (parts, quantities, HP): theta, a_z, a_z times the input
        ("weight_hh", "float*"),
        ("weight_ih", "float*"),
        ("bias_ih", "float*"),
        ("bias_hh", "float*"),
        ("theta", "float*"),
        ("H", "int"),
        ("HP", "int"),
        ("width", "int"),
        ("I", "int"),
        ("IP", "int"),
        ("quantities", "int"),  # 3 if the input has one feature, else 2
        ("parts", "int"),
        ("after", "int"),
    ],
)
