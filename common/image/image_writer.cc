// Copying rectangles of tensors into place. Contract: image_writer.h. Room: common/image.
#include "common/image/image_writer.h"

#include <string.h>

#include <algorithm>

#include "common/base/check.h"
#include "common/formats/tensor_plan.h"

namespace hearth {
namespace {

// Calls run(segment, to, from, bytes) for each run of placed bytes that a piece [at, at + bytes) of `source` brings;
// `at` and `bytes` count placed bytes. `run` returns false to stop.
template <typename Run>
bool ForEachRun(const ImageSource& source, uint64_t at, const uint8_t* data, uint64_t bytes, Run&& run) {
  const uint64_t width = source.row_bytes;
  const uint64_t end = at + bytes;
  // `from`: where in the target's row the run's first byte would lie without gaps.
  const auto place = [&](uint32_t segment, uint64_t row_to, uint64_t from, const uint8_t* bytes_at, uint64_t count) {
    if (source.run_bytes == 0) return run(segment, row_to + from, bytes_at, count);
    while (count > 0) {
      const uint64_t in_run = from % source.run_bytes;
      const uint64_t take = std::min(count, source.run_bytes - in_run);
      if (!run(segment, row_to + from / source.run_bytes * source.run_stride + in_run, bytes_at, take)) return false;
      from += take;
      bytes_at += take;
      count -= take;
    }
    return true;
  };
  for (const CopyRect& rect : source.rects) {
    if (rect.col_bytes == width && rect.to_stride == width) {  // whole rows: one run
      const uint64_t rect_begin = rect.row_begin * width;
      const uint64_t begin = std::max(at, rect_begin);
      const uint64_t stop = std::min(end, rect_begin + rect.rows * width);
      if (begin < stop && !place(rect.segment, rect.to, begin - rect_begin, data + (begin - at), stop - begin)) return false;
      continue;
    }
    const uint64_t first_row = std::max(rect.row_begin, at / width);
    const uint64_t last_row = std::min(rect.row_begin + rect.rows, (end + width - 1) / width);
    for (uint64_t row = first_row; row < last_row; ++row) {
      const uint64_t rect_begin = row * width + rect.col_begin;
      const uint64_t begin = std::max(at, rect_begin);
      const uint64_t stop = std::min(end, rect_begin + rect.col_bytes);
      if (begin >= stop) continue;
      const uint64_t row_to = rect.to + (row - rect.row_begin) * rect.to_stride;
      if (!place(rect.segment, row_to, begin - rect_begin, data + (begin - at), stop - begin)) return false;
    }
  }
  return true;
}

// The piece as it is placed: BF16 scales widened to F32 into `scratch`, everything else untouched.
struct PlacedPiece {
  uint64_t at;
  const uint8_t* data;
  uint64_t bytes;
};
PlacedPiece AsPlaced(const ImageSource& source, uint64_t at, const uint8_t* data, uint64_t bytes, std::vector<float>& scratch) {
  if (!source.widen) return {at, data, bytes};
  scratch.resize(bytes / sizeof(bf16));
  for (size_t i = 0; i < scratch.size(); ++i) {
    bf16 value;
    memcpy(&value, data + i * sizeof(value), sizeof(value));
    scratch[i] = ToFloat(value);
  }
  return {at * 2, reinterpret_cast<const uint8_t*>(scratch.data()), bytes * 2};
}

// A source's XXH3-128, over one piece or several.
void HashPiece(const CheckpointTensor& tensor, uint64_t at, const uint8_t* data, uint64_t bytes, std::unique_ptr<Hasher128>& hasher,
               Hash128& digest) {
  if (at == 0 && bytes == tensor.bytes) {
    digest = Xxh3_128(data, bytes);
    return;
  }
  if (at == 0) hasher = std::make_unique<Hasher128>();
  hasher->Update(data, bytes);
  if (at + bytes == tensor.bytes) {
    digest = hasher->Digest();
    hasher.reset();
  }
}

absl::Status CheckPiece(const ImageSource& source, uint64_t at, const uint8_t* data, uint64_t bytes) {
  const CheckpointTensor& tensor = *source.tensor;
  if (tensor.dtype == DType::kInvalid) return absl::OkStatus();  // INT4's nibbles: every code is a number
  const DTypeBlock block = BlockOf(tensor.dtype);
  const uint64_t block_bytes = static_cast<uint64_t>(block.bytes), elements = static_cast<uint64_t>(block.elements);
  const absl::Status status = CheckValues(tensor.name, tensor.dtype, data, bytes / block_bytes * elements, source.is_scale);
  return at == 0 ? status : Annotate(status, absl::StrCat("counting from element ", at / block_bytes * elements));
}

}  // namespace

TargetRange RangeOfTarget(const Manifest& manifest, uint32_t target) {
  if (target < manifest.tensors.size()) {
    const TensorRow& row = manifest.tensors[target];
    return {row.segment, row.offset, TensorEnd(row) - row.offset, row.sum};
  }
  const ExpertRow& row = manifest.experts[target - manifest.tensors.size()];
  return {row.segment, row.offset, row.bytes, row.sum};
}

ImageWriter::ImageWriter(const ImagePlan& plan, std::vector<SegmentBytes<uint8_t>> segments)
    : plan_(plan),
      segments_(std::move(segments)),
      hashers_(plan.sources.size()),
      digests_(plan.sources.size()),
      sums_(plan.target_parts.size(), 0),
      parts_left_(new std::atomic<uint32_t>[plan.target_parts.size()]) {
  for (size_t i = 0; i < plan.target_parts.size(); ++i) parts_left_[i].store(plan.target_parts[i], std::memory_order_relaxed);
}

absl::Status ImageWriter::Piece(size_t index, uint64_t at, const uint8_t* data, uint64_t bytes) {
  const ImageSource& source = plan_.sources[index];
  RETURN_IF_ERROR(CheckPiece(source, at, data, bytes));
  HashPiece(*source.tensor, at, data, bytes, hashers_[index], digests_[index]);
  std::vector<float> scratch;
  const PlacedPiece piece = AsPlaced(source, at, data, bytes, scratch);
  ForEachRun(source, piece.at, piece.data, piece.bytes, [&](uint32_t segment, uint64_t to, const uint8_t* from, uint64_t run_bytes) {
    memcpy(segments_[segment].At(to), from, run_bytes);
    return true;
  });
  return absl::OkStatus();
}

absl::Status ImageWriter::Done(size_t index) {
  for (const CopyRect& rect : plan_.sources[index].rects) {
    // The last part's thread sees what the others have copied: their decrements release, this one acquires.
    if (parts_left_[rect.target].fetch_sub(1, std::memory_order_acq_rel) != 1) continue;
    const TargetRange range = RangeOfTarget(plan_.manifest, rect.target);
    sums_[rect.target] = Xxh3_64(segments_[range.segment].At(range.offset), range.bytes);
  }
  return absl::OkStatus();
}

ImageComparer::ImageComparer(const ImagePlan& plan, std::vector<SegmentBytes<const uint8_t>> segments)
    : plan_(plan), segments_(std::move(segments)), hashers_(plan.sources.size()), digests_(plan.sources.size()) {}

absl::Status ImageComparer::Piece(size_t index, uint64_t at, const uint8_t* data, uint64_t bytes) {
  const ImageSource& source = plan_.sources[index];
  HashPiece(*source.tensor, at, data, bytes, hashers_[index], digests_[index]);
  std::vector<float> scratch;
  const PlacedPiece piece = AsPlaced(source, at, data, bytes, scratch);
  const bool equal =
      ForEachRun(source, piece.at, piece.data, piece.bytes, [&](uint32_t segment, uint64_t to, const uint8_t* from, uint64_t run_bytes) {
        return memcmp(segments_[segment].At(to), from, run_bytes) == 0;
      });
  if (equal) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat("tensor ", source.tensor->name, ": the image differs from ",
                                          plan_.checkpoint.files()[static_cast<size_t>(source.tensor->file)].path));
}

absl::Status ImageComparer::Done(size_t) { return absl::OkStatus(); }

}  // namespace hearth
