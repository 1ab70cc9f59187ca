#include "common/kernels/kernels_cases.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace hearth {

GuardedBytes::GuardedBytes(size_t bytes) {
  const size_t page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t body = (bytes + page - 1) / page * page;
  map_bytes_ = body + page;
  map_ = mmap(nullptr, map_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (map_ == MAP_FAILED || mprotect(static_cast<uint8_t*>(map_) + body, page, PROT_NONE) != 0) {
    std::perror("kernels_cases: no memory for a guarded buffer");
    std::abort();
  }
  // As weights in shared memory are; short streams over 4 KiB pages cost a fifth.
  if (bytes >= (4u << 20)) madvise(map_, map_bytes_, MADV_HUGEPAGE);
  data_ = static_cast<uint8_t*>(map_) + body - bytes;
}

GuardedBytes::~GuardedBytes() {
  if (map_ != nullptr) munmap(map_, map_bytes_);
}

GuardedBytes::GuardedBytes(GuardedBytes&& other) noexcept
    : map_(std::exchange(other.map_, nullptr)), map_bytes_(other.map_bytes_), data_(other.data_) {}

namespace {

int64_t WholeBlocks(DType dtype, int64_t n) {
  const int64_t block = BlockOf(dtype).elements;
  return (n + block - 1) / block * block;
}

size_t MatrixBytes(DType dtype, int64_t rows, int64_t cols, int64_t row_stride) {
  // The last row ends at its last column, not at its stride.
  return rows > 0 ? DTypeBytes(dtype, static_cast<uint64_t>((rows - 1) * WholeBlocks(dtype, row_stride) + WholeBlocks(dtype, cols))) : 0;
}

}  // namespace

MatrixCase::MatrixCase(std::mt19937& rng, DType dtype, int64_t rows, int64_t cols, int64_t row_stride, int64_t scale_row0)
    : data_(MatrixBytes(dtype, rows, cols, row_stride)) {
  view_ = {.data = data_.data(),
           .dtype = dtype,
           .rows = rows,
           .cols = WholeBlocks(dtype, cols),
           .row_stride = WholeBlocks(dtype, row_stride),
           .scale_row0 = scale_row0};
  if (IsBlockFormat(dtype)) {
    FillBlocks(rng);
    return;
  }
  // Drawn from a pool: the bench's matrices have hundreds of millions of elements.
  constexpr size_t kPool = 1 << 16;
  std::normal_distribution<float> normal;
  std::vector<float> pool(kPool);
  for (float& x : pool) x = normal(rng);
  size_t next = rng() % kPool;
  for (int64_t r = 0; r < rows; ++r) {
    for (int64_t c = 0; c < cols; ++c) {
      const float x = pool[next++ % kPool];
      uint8_t* to = data_.data() + DTypeBytes(dtype, static_cast<uint64_t>(r * row_stride + c));
      if (dtype == DType::kF8E4M3) {
        *to = FloatToF8E4M3(x * 64.0f * pool[(next * 7) % kPool]);
      } else if (dtype == DType::kF32) {
        std::memcpy(to, &x, sizeof(x));
      } else {
        const uint16_t bits = dtype == DType::kBF16 ? ToBf16(x).bits : FloatToF16(x);
        std::memcpy(to, &bits, sizeof(bits));
      }
    }
  }
  if (dtype != DType::kF8E4M3) return;
  view_.scale_stride = ScaleBlocks(cols) + 1;
  std::uniform_real_distribution<float> scale(0.5f / 64, 2.0f / 64);
  scales_.resize(static_cast<size_t>(ScaleBlocks(scale_row0 + rows) * view_.scale_stride));
  for (float& s : scales_) s = scale(rng);
  view_.scales = scales_.data();
}

void MatrixCase::FillBlocks(std::mt19937& rng) {
  const DTypeBlock block = BlockOf(view_.dtype);
  std::uniform_real_distribution<float> scale(0.5f / 64, 2.0f / 64);
  for (int64_t r = 0; r < view_.rows; ++r) {
    for (int64_t c = 0; c < view_.cols; c += block.elements) {
      uint8_t* to = data_.data() + DTypeBytes(view_.dtype, static_cast<uint64_t>(r * view_.row_stride + c));
      for (int64_t i = 0; i < block.bytes; ++i) to[i] = static_cast<uint8_t>(rng() >> 11);
      const auto put = [&](int64_t at, uint16_t bits) { std::memcpy(to + at, &bits, sizeof(bits)); };
      const float d = scale(rng) * (rng() % 8 == 0 ? -1.0f : 1.0f);
      if (view_.dtype == DType::kI4G32) put(0, ToBf16(d).bits);
      const bool minima = view_.dtype == DType::kQ4_K || view_.dtype == DType::kQ5_K;
      if (view_.dtype == DType::kQ8_0 || minima) put(0, FloatToF16(d));
      if (minima) put(2, FloatToF16(scale(rng) * 7));
      if (view_.dtype == DType::kQ6_K) put(208, FloatToF16(d));
      if (view_.dtype == DType::kQ3_K) put(108, FloatToF16(d));
    }
  }
}

double MatrixCase::Magnitude(int64_t row, int64_t col) const {
  if (!IsBlockFormat(view_.dtype)) return std::fabs(static_cast<double>(Element(row, col)) * Scale(row, col));
  const DTypeBlock block = BlockOf(view_.dtype);
  DecodedBlock numbers;
  DecodeBlock(view_.dtype,
              data_.data() + DTypeBytes(view_.dtype, static_cast<uint64_t>(row * view_.row_stride + col / block.elements * block.elements)), numbers);
  const int64_t i = col % block.elements, part = i / numbers.part_columns;
  return std::fabs(static_cast<double>(numbers.scale[part]) * numbers.q[i]) + std::fabs(static_cast<double>(numbers.min[part]));
}

float MatrixCase::Element(int64_t row, int64_t col) const {
  if (IsBlockFormat(view_.dtype)) {
    const int64_t block = BlockOf(view_.dtype).elements;
    float weights[kBlockColumnsMax];
    DequantizeRow(view_.dtype, data_.data() + DTypeBytes(view_.dtype, static_cast<uint64_t>(row * view_.row_stride + col / block * block)), block,
                  weights);
    return weights[col % block];
  }
  const uint8_t* from = data_.data() + DTypeBytes(view_.dtype, static_cast<uint64_t>(row * view_.row_stride + col));
  if (view_.dtype == DType::kF8E4M3) return F8E4M3ToFloat(*from);
  if (view_.dtype == DType::kF32) {
    float x;
    std::memcpy(&x, from, sizeof(x));
    return x;
  }
  uint16_t bits;
  std::memcpy(&bits, from, sizeof(bits));
  return view_.dtype == DType::kBF16 ? ToFloat(bf16{bits}) : F16ToFloat(bits);
}

float MatrixCase::Scale(int64_t row, int64_t col) const {
  if (view_.dtype != DType::kF8E4M3) return 1.0f;
  return view_.scales[(view_.scale_row0 + row) / kScaleBlock * view_.scale_stride + col / kScaleBlock];
}

namespace {

constexpr int64_t kF8Codes = 254;
// Of rows that begin in the middle of a block, in two blocks of columns.
constexpr float kF8Scales[3][2] = {{1.0f, 0.25f}, {0.5f, 2.0f}, {1.0f, 4.0f}};
constexpr int64_t kF8ScaleRow0 = 50;

}  // namespace

AllF8Codes::AllF8Codes(int64_t cols) : cols_(cols) {
  std::vector<uint8_t> codes;
  for (int code = 0; code < 256; ++code) {
    if ((code & 0x7f) != 0x7f) codes.push_back(static_cast<uint8_t>(code));
  }
  for (int64_t r = 0; r < kF8Codes; ++r) {
    for (int64_t c = 0; c < cols; ++c) data_.push_back(codes[static_cast<size_t>((r + 31 * c) % kF8Codes)]);
  }
}

WeightView AllF8Codes::view() const {
  return {.data = data_.data(),
          .dtype = DType::kF8E4M3,
          .rows = kF8Codes,
          .cols = cols_,
          .row_stride = cols_,
          .scales = kF8Scales[0],
          .scale_stride = 2,
          .scale_row0 = kF8ScaleRow0};
}

float AllF8Codes::Scale(int64_t row, int64_t col) const { return kF8Scales[(kF8ScaleRow0 + row) / kScaleBlock][col / kScaleBlock]; }

void FillGaussian(std::mt19937& rng, std::span<bf16> out, float deviation) {
  std::normal_distribution<float> normal(0.0f, deviation);
  for (bf16& x : out) x = ToBf16(normal(rng));
}

void FillGaussian(std::mt19937& rng, std::span<float> out, float deviation) {
  std::normal_distribution<float> normal(0.0f, deviation);
  for (float& x : out) x = normal(rng);
}

}  // namespace hearth
