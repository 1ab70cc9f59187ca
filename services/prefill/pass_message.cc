#include "services/prefill/pass_message.h"

#include <cstring>

#include "common/shm/kv_pool.h"

namespace hearth {
namespace {

// Little endian, as the machine has it: the ranks are processes of one node and one build.
struct Header {
  uint64_t sequences = 0;
  uint64_t tokens = 0;
};
// Behind it, for each sequence: this, its pages, its hidden state if it has one; then the token ids.
struct SequenceHeader {
  int64_t first_row = 0;
  int64_t num_rows = 0;
  int64_t start_position = 0;
  int64_t write_from = 0;
  uint64_t pages = 0;
  uint64_t has_hidden = 0;
};

template <typename T>
void Append(const T* data, size_t count, std::vector<uint8_t>& bytes) {
  if (count == 0) return;
  const size_t at = bytes.size();
  bytes.resize(at + count * sizeof(T));
  std::memcpy(bytes.data() + at, data, count * sizeof(T));
}

class Reader {
 public:
  explicit Reader(const std::vector<uint8_t>& bytes) : bytes_(bytes) {}

  template <typename T>
  bool Read(uint64_t count, std::vector<T>& out) {
    if (count > (bytes_.size() - at_) / sizeof(T)) return false;
    out.resize(count);
    if (count > 0) std::memcpy(out.data(), bytes_.data() + at_, count * sizeof(T));
    at_ += count * sizeof(T);
    return true;
  }
  template <typename T>
  bool Read(T& out) {
    if (sizeof(T) > bytes_.size() - at_) return false;
    std::memcpy(&out, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return true;
  }
  bool AtEnd() const { return at_ == bytes_.size(); }

 private:
  const std::vector<uint8_t>& bytes_;
  size_t at_ = 0;
};

}  // namespace

std::vector<uint8_t> EncodePass(const ForwardBatch& batch, int64_t hidden_size) {
  std::vector<uint8_t> bytes;
  const Header header{.sequences = batch.sequences.size(), .tokens = batch.token_ids.size()};
  Append(&header, 1, bytes);
  for (size_t i = 0; i < batch.sequences.size(); ++i) {
    const KvSequence& sequence = batch.sequences[i];
    const float* hidden = i < batch.prior_hidden.size() ? batch.prior_hidden[i] : nullptr;
    const SequenceHeader of{.first_row = sequence.first_row,
                            .num_rows = sequence.num_rows,
                            .start_position = sequence.start_position,
                            .write_from = sequence.write_from,
                            .pages = static_cast<uint64_t>((sequence.start_position + sequence.num_rows + kPageTokens - 1) / kPageTokens),
                            .has_hidden = hidden != nullptr};
    Append(&of, 1, bytes);
    Append(sequence.pages, of.pages, bytes);
    if (hidden != nullptr) Append(hidden, static_cast<size_t>(hidden_size), bytes);
  }
  Append(batch.token_ids.data(), batch.token_ids.size(), bytes);
  return bytes;
}

absl::StatusOr<PassMessage> DecodePass(const std::vector<uint8_t>& bytes, int64_t hidden_size) {
  const absl::Status damaged = absl::DataLossError("a shared pass: its message is damaged, or of another build of hearth-prefill");
  Reader reader(bytes);
  Header header;
  if (!reader.Read(header) || header.sequences > bytes.size() / sizeof(SequenceHeader)) return damaged;
  PassMessage message;
  message.batch.form = Form::kPrefill;
  message.pages.resize(header.sequences);
  message.hidden.resize(header.sequences);
  for (uint64_t i = 0; i < header.sequences; ++i) {
    SequenceHeader of;
    if (!reader.Read(of) || of.num_rows < 1 || of.start_position < 0 || of.num_rows > INT32_MAX || of.start_position > INT32_MAX) return damaged;
    // As many pages as its positions take: the engine reads no more.
    if (of.pages != static_cast<uint64_t>((of.start_position + of.num_rows + kPageTokens - 1) / kPageTokens)) return damaged;
    if (!reader.Read(of.pages, message.pages[i])) return damaged;
    if (of.has_hidden != 0 && !reader.Read(static_cast<uint64_t>(hidden_size), message.hidden[i])) return damaged;
    message.batch.sequences.push_back({.first_row = of.first_row,
                                       .num_rows = of.num_rows,
                                       .start_position = of.start_position,
                                       .write_from = of.write_from,
                                       .pages = message.pages[i].data()});
    message.batch.prior_hidden.push_back(of.has_hidden != 0 ? message.hidden[i].data() : nullptr);
  }
  if (!reader.Read(header.tokens, message.batch.token_ids) || !reader.AtEnd()) return damaged;
  return message;
}

}  // namespace hearth
