// Inputs for the kernels' test and bench: one generator for both, so that what is measured is what is checked.
// Room: common/kernels, test and bench only.
#pragma once

#include <cstdint>
#include <random>
#include <span>
#include <vector>

#include "common/kernels/kernels.h"

namespace hearth {

// `n` elements that end right before an unmapped page: reading one byte too far is a crash, in any build.
template <class T>
class GuardedArray;

class GuardedBytes {
 public:
  explicit GuardedBytes(size_t bytes);
  ~GuardedBytes();
  GuardedBytes(GuardedBytes&& other) noexcept;
  GuardedBytes& operator=(GuardedBytes&&) = delete;
  uint8_t* data() const { return data_; }

 private:
  void* map_ = nullptr;
  size_t map_bytes_ = 0;
  uint8_t* data_ = nullptr;
};

template <class T>
class GuardedArray {
 public:
  explicit GuardedArray(int64_t n, T value = T{}) : bytes_(static_cast<size_t>(n) * sizeof(T)), n_(n) {
    for (int64_t i = 0; i < n; ++i) data()[i] = value;
  }
  T* data() const { return reinterpret_cast<T*>(bytes_.data()); }
  T& operator[](int64_t i) const { return data()[i]; }
  int64_t size() const { return n_; }
  std::vector<T> Copy() const { return std::vector<T>(data(), data() + n_); }

 private:
  GuardedBytes bytes_;
  int64_t n_;
};

// A random matrix. FP8: Gaussian values times 64, so that every exponent occurs, subnormals too; never a NaN code. Block formats: every code,
// Q8_0's -128 too, scales of both signs; cols and row_stride are rounded up to whole blocks.
class MatrixCase {
 public:
  MatrixCase(std::mt19937& rng, DType dtype, int64_t rows, int64_t cols, int64_t row_stride, int64_t scale_row0);

  const WeightView& view() const { return view_; }
  // By the scalar conversions of common/base; without the scale.
  float Element(int64_t row, int64_t col) const;
  float Scale(int64_t row, int64_t col) const;  // 1 if there are none
  // What rounding in a sum goes by: the weight's magnitude, the minimum of Q4_K and Q5_K counted on its own.
  double Magnitude(int64_t row, int64_t col) const;

 private:
  void FillBlocks(std::mt19937& rng);

  GuardedBytes data_;
  std::vector<float> scales_;
  WeightView view_;
};

// Every E4M3 code but NaN once in each column, with scales that are powers of two: a product with one element of x is exact.
class AllF8Codes {
 public:
  explicit AllF8Codes(int64_t cols);  // at most 256

  WeightView view() const;
  uint8_t code(int64_t row, int64_t col) const { return data_[static_cast<size_t>(row * cols_ + col)]; }
  float Scale(int64_t row, int64_t col) const;

 private:
  int64_t cols_;
  std::vector<uint8_t> data_;
};

void FillGaussian(std::mt19937& rng, std::span<bf16> out, float deviation = 1.0f);
void FillGaussian(std::mt19937& rng, std::span<float> out, float deviation = 1.0f);

}  // namespace hearth
