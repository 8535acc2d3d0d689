// Numpy arrays and Python lists as inputs of the engine, read through the buffer protocol.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <cstring>
#include <vector>

namespace egru::engine {

namespace nb = nanobind;

// The memory of a numpy array, if it is contiguous float32 of shape ([streams,] columns).
class ArrayView {
public:
    ArrayView(nb::handle array, bool writable, int streams, int columns) {
        const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT | (writable ? PyBUF_WRITABLE : 0);
        if (PyObject_GetBuffer(array.ptr(), &view_, flags) != 0) {
            PyErr_Clear();
            return;
        }
        const int dims = streams == 1 ? 1 : 2;
        if (view_.ndim == dims && std::strcmp(view_.format, "f") == 0 && view_.shape[dims - 1] == columns &&
            (dims == 1 || view_.shape[0] == streams))
            data_ = static_cast<float*>(view_.buf);
    }
    ~ArrayView() { PyBuffer_Release(&view_); }
    ArrayView(const ArrayView&) = delete;
    ArrayView& operator=(const ArrayView&) = delete;
    float* data() const { return data_; }  // null if the array does not fit

private:
    Py_buffer view_{};
    float* data_ = nullptr;
};

// The memory of a contiguous numpy vector whose elements have the given format of the buffer protocol.
class VectorView {
public:
    VectorView(nb::handle array, const char* format) {
        if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_C_CONTIGUOUS | PyBUF_FORMAT) != 0) {
            PyErr_Clear();
            return;
        }
        if (view_.ndim == 1 && std::strcmp(view_.format, format) == 0) data_ = view_.buf;
    }
    ~VectorView() { PyBuffer_Release(&view_); }
    VectorView(const VectorView&) = delete;
    VectorView& operator=(const VectorView&) = delete;
    const void* data() const { return data_; }  // null if the array does not fit
    size_t count() const { return static_cast<size_t>(view_.shape[0]); }

private:
    Py_buffer view_{};
    const void* data_ = nullptr;
};

// The active entries of an input, from lists of Python numbers or from numpy arrays of int32 and float32.
class SparseReader {
public:
    // Returns false if the types are others, or if indices are out of range or not in ascending order.
    bool read(nb::handle indices, nb::handle values, int size) {
        index_.clear();
        value_.clear();
        const bool lists = PyList_CheckExact(indices.ptr()) && PyList_CheckExact(values.ptr());
        if (!(lists ? read_lists(indices.ptr(), values.ptr()) : read_arrays(indices, values))) return false;
        for (size_t i = 0; i < index_.size(); ++i)
            if (index_[i] < 0 || index_[i] >= size || (i > 0 && index_[i] <= index_[i - 1])) return false;
        return true;
    }
    const int32_t* index() const { return index_.data(); }
    const float* value() const { return value_.data(); }
    int count() const { return static_cast<int>(index_.size()); }

private:
    bool read_lists(PyObject* indices, PyObject* values) {
        const Py_ssize_t count = PyList_Size(indices);
        if (PyList_Size(values) != count) return false;
        for (Py_ssize_t i = 0; i < count; ++i) {
            PyObject *index = PyList_GetItem(indices, i), *value = PyList_GetItem(values, i);
            if (!PyLong_CheckExact(index) || !PyFloat_CheckExact(value)) return false;
            int overflow = 0;
            const long number = PyLong_AsLongAndOverflow(index, &overflow);
            const int32_t narrow = static_cast<int32_t>(number);
            index_.push_back(overflow != 0 || number != narrow ? -1 : narrow);
            value_.push_back(static_cast<float>(PyFloat_AsDouble(value)));
        }
        return true;
    }

    bool read_arrays(nb::handle indices, nb::handle values) {
        const VectorView index(indices, "i"), value(values, "f");
        if (index.data() == nullptr || value.data() == nullptr || index.count() != value.count()) return false;
        index_.resize(index.count());
        value_.resize(index.count());
        std::memcpy(index_.data(), index.data(), index.count() * sizeof(int32_t));
        std::memcpy(value_.data(), value.data(), index.count() * sizeof(float));
        return true;
    }

    std::vector<int32_t> index_;
    std::vector<float> value_;
};

}  // namespace egru::engine
