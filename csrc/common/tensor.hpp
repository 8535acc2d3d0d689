// Reads torch tensors through the C interface of DLPack (version 1), which is several times faster than their Python
// attributes and needs no headers of torch. Include it in bindings only: it calls Python.
#pragma once

#include <Python.h>

#include <cstdint>

namespace egru {

// The part of DLPack that is used here, with its layout.
struct DLTensor {
    void* data;
    std::int32_t device_type, device_id;
    std::int32_t ndim;
    std::uint8_t code, bits;
    std::uint16_t lanes;
    std::int64_t *shape, *strides;
    std::uint64_t byte_offset;
};

struct DLPackExchange {
    std::uint32_t major, minor;
    void* previous;
    void *allocate, *managed_from_object, *managed_to_object;
    int (*from_object)(void* object, DLTensor* tensor);
};

// torch.Tensor and its table of functions; null without torch, or if its DLPack has another version.
struct TensorType {
    PyTypeObject* type = nullptr;
    const DLPackExchange* exchange = nullptr;
    PyObject* is_neg = PyUnicode_InternFromString("is_neg");
    PyObject* requires_grad = PyUnicode_InternFromString("requires_grad");

    TensorType() {
        PyObject* module = PyImport_ImportModule("torch");
        PyObject* tensor = module ? PyObject_GetAttrString(module, "Tensor") : nullptr;
        PyObject* capsule = tensor ? PyObject_GetAttrString(tensor, "__dlpack_c_exchange_api__") : nullptr;
        void* table = capsule ? PyCapsule_GetPointer(capsule, "dlpack_exchange_api") : nullptr;
        PyErr_Clear();
        if (table == nullptr || static_cast<DLPackExchange*>(table)->major != 1) return;
        exchange = static_cast<DLPackExchange*>(table);  // valid as long as the process; the references are kept
        type = reinterpret_cast<PyTypeObject*>(tensor);
    }
    static const TensorType& get() {
        static const TensorType* type = new TensorType;
        return *type;
    }
};

// Whether an attribute or the result of a method is False; an error counts as no.
inline bool is_false(PyObject* value) {
    if (value == nullptr) PyErr_Clear();
    Py_XDECREF(value);
    return value == Py_False;
}

// The values of a torch.Tensor, not of a subclass, on the CPU; null if it is something else, has another type or shape,
// or is not contiguous. Check is_negated, too.
inline float* read_floats(PyObject* object, int ndim, std::int64_t rows, std::int64_t columns) {
    const TensorType& torch = TensorType::get();
    DLTensor t;
    if (Py_TYPE(object) != torch.type) return nullptr;
    if (torch.exchange->from_object(object, &t) != 0) {
        PyErr_Clear();
        return nullptr;
    }
    constexpr int cpu = 1, floating = 2;
    if (t.device_type != cpu || t.code != floating || t.bits != 32 || t.lanes != 1 || t.ndim != ndim) return nullptr;
    if (t.shape[ndim - 1] != columns || (columns > 1 && t.strides[ndim - 1] != 1)) return nullptr;
    if (ndim == 2 && (t.shape[0] != rows || (rows > 1 && t.strides[0] != columns))) return nullptr;
    return reinterpret_cast<float*>(static_cast<char*>(t.data) + t.byte_offset);
}

// Whether the values are stored with the opposite sign.
inline bool is_negated(PyObject* tensor) {
    return !is_false(PyObject_CallMethodNoArgs(tensor, TensorType::get().is_neg));
}

inline bool requires_gradient(PyObject* tensor) {
    return !is_false(PyObject_GetAttr(tensor, TensorType::get().requires_grad));
}

}  // namespace egru
