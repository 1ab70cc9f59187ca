#include "services/prefill/pass_message.h"

#include "common/base/ceil_div.h"
#include "common/shm/kv_pool.h"
#include "hearth/v1/pass.pb.h"

namespace hearth {
namespace {

int64_t PagesOf(int64_t start_position, int64_t num_rows) { return CeilDiv(start_position + num_rows, kPageTokens); }

}  // namespace

std::vector<uint8_t> EncodePass(const ForwardBatch& batch, int64_t hidden_size) {
  v1::SharedPass pass;
  for (size_t i = 0; i < batch.sequences.size(); ++i) {
    const KvSequence& from = batch.sequences[i];
    const float* hidden = i < batch.prior_hidden.size() ? batch.prior_hidden[i] : nullptr;
    v1::SharedPass::Sequence& to = *pass.add_sequences();
    to.set_num_rows(from.num_rows);
    to.set_start_position(from.start_position);
    to.set_write_from(from.write_from);
    to.mutable_pages()->Add(from.pages, from.pages + PagesOf(from.start_position, from.num_rows));
    if (hidden != nullptr) to.mutable_prior_hidden()->Add(hidden, hidden + hidden_size);
  }
  pass.mutable_token_ids()->Add(batch.token_ids.begin(), batch.token_ids.end());
  std::vector<uint8_t> bytes(pass.ByteSizeLong());
  pass.SerializeToArray(bytes.data(), static_cast<int>(bytes.size()));
  return bytes;
}

absl::StatusOr<PassMessage> DecodePass(const std::vector<uint8_t>& bytes, int64_t hidden_size) {
  const absl::Status damaged = absl::DataLossError("a shared pass: its message is damaged, or of another build of hearth-prefill");
  v1::SharedPass pass;
  if (!pass.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())) || pass.sequences().empty()) return damaged;
  PassMessage message;
  message.batch.form = Form::kPrefill;
  message.batch.token_ids.assign(pass.token_ids().begin(), pass.token_ids().end());
  int64_t rows = 0;
  for (const v1::SharedPass::Sequence& from : pass.sequences()) {
    if (from.num_rows() < 1 || from.start_position() < 0 || from.num_rows() > INT32_MAX || from.start_position() > INT32_MAX) return damaged;
    // As many pages as its positions take: the engine reads no more.
    if (from.pages_size() != PagesOf(from.start_position(), from.num_rows())) return damaged;
    if (from.prior_hidden_size() != 0 && from.prior_hidden_size() != hidden_size) return damaged;
    const std::vector<int32_t>& pages = message.pages.emplace_back(from.pages().begin(), from.pages().end());
    const std::vector<float>& hidden = message.hidden.emplace_back(from.prior_hidden().begin(), from.prior_hidden().end());
    message.batch.sequences.push_back({.first_row = rows,
                                       .num_rows = from.num_rows(),
                                       .start_position = from.start_position(),
                                       .write_from = from.write_from(),
                                       .pages = pages.data()});
    message.batch.prior_hidden.push_back(hidden.empty() ? nullptr : hidden.data());
    rows += from.num_rows();
  }
  if (rows != static_cast<int64_t>(message.batch.token_ids.size())) return damaged;
  return message;
}

}  // namespace hearth
