#include "common/model/batch_check.h"

#include "absl/strings/str_cat.h"

namespace hearth {
namespace {

template <typename... Parts>
absl::Status Bad(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat("batch: ", parts...));
}

absl::Status CheckSequence(const ModelConfig& config, const KvGeometry& pool, const KvSequence& s, int64_t index) {
  if (s.num_rows < 1) return Bad("sequence ", index, " has ", s.num_rows, " rows");
  const int64_t end = s.start_position + s.num_rows;
  if (s.start_position < 0 || end > config.max_position_embeddings) {
    return Bad("sequence ", index, " reaches position ", end - 1, "; the model ends at ", config.max_position_embeddings - 1,
               " (max_position_embeddings in config.json)");
  }
  if (s.pages == nullptr) return Bad("sequence ", index, " has no KV pages");
  for (int64_t page = 0; page * kPageTokens < end; ++page) {
    if (s.pages[page] < 0 || static_cast<uint64_t>(s.pages[page]) >= pool.num_pages) {
      return Bad("sequence ", index, " names KV page ", s.pages[page], " of a pool of ", pool.num_pages);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckBatch(const ModelConfig& config, const KvGeometry& expected, const KvGeometry& pool, int64_t max_rows, int64_t max_logit_rows,
                        const ForwardBatch& batch) {
  const int64_t m = static_cast<int64_t>(batch.token_ids.size());
  if (m < 1 || m > max_rows) return Bad(m, " rows; the workspace takes 1 to ", max_rows);
  if (static_cast<int64_t>(batch.logit_rows.size()) > max_logit_rows) {
    return Bad(batch.logit_rows.size(), " rows of logits wanted; the workspace takes ", max_logit_rows);
  }
  for (const int32_t id : batch.token_ids) {
    if (id < 0 || id >= config.vocab_size) return Bad("token id ", id, " is outside the vocabulary of ", config.vocab_size);
  }
  for (const int32_t row : batch.logit_rows) {
    if (row < 0 || row >= m) return Bad("logits of row ", row, " wanted from ", m, " rows");
  }
  if (const absl::Status fits = CheckFits(pool, expected); !fits.ok()) return Bad(fits.message());
  int64_t next_row = 0;
  for (size_t i = 0; i < batch.sequences.size(); ++i) {
    const KvSequence& s = batch.sequences[i];
    if (s.first_row != next_row) return Bad("sequence ", i, " begins at row ", s.first_row, ", not ", next_row);
    RETURN_IF_ERROR(CheckSequence(config, pool, s, static_cast<int64_t>(i)));
    next_row += s.num_rows;
  }
  if (next_row != m) return Bad("the sequences hold ", next_row, " rows, the batch ", m);
  return absl::OkStatus();
}

absl::Status CheckPriorHidden(const ForwardBatch& batch) {
  for (size_t i = 0; i < batch.sequences.size(); ++i) {
    const KvSequence& s = batch.sequences[i];
    if (s.start_position == 0 || s.write_from > s.start_position) continue;
    if (i >= batch.prior_hidden.size() || batch.prior_hidden[i] == nullptr) {
      return Bad("sequence ", i, " writes position ", s.start_position, " without the hidden state at the one before: begin there, or bring it");
    }
  }
  return absl::OkStatus();
}

absl::Status CheckDraft(const ForwardBatch& batch) {
  if (batch.form != Form::kDecode) return Bad("drafts are made in the decode form");
  if (batch.logit_rows.size() != batch.token_ids.size()) return Bad("a draft wants the logits of every row");
  for (size_t i = 0; i < batch.sequences.size(); ++i) {
    const KvSequence& s = batch.sequences[i];
    if (s.num_rows != 1 || s.start_position < 1) return Bad("draft ", i, " has ", s.num_rows, " rows from position ", s.start_position);
    if (i >= batch.prior_hidden.size() || batch.prior_hidden[i] == nullptr) return Bad("draft ", i, " has no hidden state");
  }
  return absl::OkStatus();
}

}  // namespace hearth
