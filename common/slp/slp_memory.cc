#include "common/slp/slp_memory.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/base/ceil_div.h"
#include "common/base/time.h"

namespace hearth {
namespace {

constexpr int64_t kSlotsMin = 2;
// Two would do; four hold a layer's two and the next layer's. With fewer the link stands still while a dense layer's network, or a layer's shared expert, is
// computed: their slots are free at the layer's end, and nothing behind the sub-layer that waits for one is loaded before it.
constexpr int64_t kSubLayerSlots = 4;
// With dispatch a rank has room for an even share of the rows and so many more, as stripes of many sequences have it.
constexpr int64_t kUnevenRows = 64;
constexpr uint64_t kRoundingRoom = 32 * DeviceRing::kSlotAlign;  // each buffer is rounded up

// Rows [first, first + count) of a buffer of rows, not owned.
Buffer Alias(const Buffer& whole, int64_t first, int64_t count, int64_t row_bytes) {
  return Buffer(whole.as<uint8_t>() + first * row_bytes, static_cast<size_t>(count * row_bytes), nullptr);
}

int64_t SlotsMin(const SlpRoom& room) { return room.slot_bytes > 0 ? kSlotsMin : 0; }

// What the chunk workspace has as views of buffers of all rows.
constexpr ForwardWorkspace::Part kOfAllRows[] = {&ForwardWorkspace::token_ids,  &ForwardWorkspace::residual,       &ForwardWorkspace::normed,
                                                 &ForwardWorkspace::expert_ids, &ForwardWorkspace::expert_weights, &ForwardWorkspace::moe};

}  // namespace

uint64_t SlpRoom::bytes_min() const {
  return fixed + static_cast<uint64_t>(SlotsMin(*this)) * slot_bytes + static_cast<uint64_t>(rows_min) * row_bytes;
}

absl::StatusOr<SlpSizes> ChooseSlpSizes(const SlpRoom& room) {
  const int64_t slots_min = SlotsMin(room);
  const uint64_t with_slots = room.fixed + static_cast<uint64_t>(slots_min) * room.slot_bytes;
  if (const uint64_t needed = room.bytes_min(); needed > room.left) {
    return absl::ResourceExhaustedError(
        absl::StrCat("streaming weights needs ", HumanBytes(static_cast<double>(needed)), " of device memory at least (", room.rows_min,
                     " rows, and ", slots_min, " experts of ", HumanBytes(static_cast<double>(room.slot_bytes)), "); the budget has ",
                     HumanBytes(static_cast<double>(room.left)), " left: raise prefill.device_memory_bytes or lower prefill.chunk_tokens"));
  }
  SlpSizes sizes;
  sizes.rows = static_cast<int64_t>(std::min<uint64_t>((room.left - with_slots) / room.row_bytes, static_cast<uint64_t>(room.rows_max)));
  const uint64_t slots_max = room.slot_bytes > 0 ? static_cast<uint64_t>(room.slots_max) : 0;
  sizes.shared_bytes = std::min(room.left - room.fixed, static_cast<uint64_t>(sizes.rows) * room.row_bytes + slots_max * room.slot_bytes);
  return sizes;
}

// What is known of the memory before any of it is taken.
struct SlpMemory::Layout {
  int64_t chunk_rows = 0, logit_rows = 0;
  uint64_t expert_room = 0, count_bytes = 0, end_bytes = 0, sub_layer_bytes = 0, uneven_bytes = 0;
  SlpRoom room;  // but for what the budget has left
};

SlpMemory::Layout SlpMemory::LayOut(const DeviceCaps& caps, const Model& model, const WeightPlan& plan, const SlpOptions& options) {
  const ModelConfig& c = model.config();
  SlpMemory& m = *this;
  Layout l;
  const int64_t ranks = options.ranks;
  const bool dispatch = m.dispatch_ = ranks > 1 && options.exchange == ExpertExchange::kDispatch;
  const int64_t chunk_rows = l.chunk_rows = std::min(options.chunk_rows, options.max_rows);
  l.logit_rows = options.with_logits ? chunk_rows : 0;
  m.hidden_ = c.hidden_size;
  m.terms_ = caps.activation_terms;
  m.top_k_ = plan.expert_bytes_max() > 0 ? c.num_experts_per_tok : 0;
  const bool has_experts = m.top_k_ > 0;
  l.expert_room =
      has_experts ? ExpertRowsWorkspaceBytes(chunk_rows, c.hidden_size, c.moe_intermediate_size, model.num_shards(), static_cast<int>(m.terms_)) : 0;

  const int64_t input_bytes = 2 * m.terms_ * m.hidden_;
  const int64_t f32_bytes = 4 * m.hidden_;
  m.widths_ = {{&m.token_ids, 4, RowOf::kOwn}, {&m.residual, f32_bytes, RowOf::kOwn}, {&m.normed, input_bytes, RowOf::kSeen}};
  const auto add = [&](std::initializer_list<Buffer*> buffers, int64_t row_bytes, RowOf row_of) {
    for (Buffer* buffer : buffers) m.widths_.push_back({buffer, row_bytes, row_of});
  };
  if (has_experts) {
    add({&m.expert_ids, &m.expert_weights}, 4 * m.top_k_, RowOf::kSeen);
    add({&m.rows_by_expert, &m.weights_by_expert}, 4 * m.top_k_, RowOf::kAll);
    add({&m.sums[0], &m.sums[1]}, f32_bytes, RowOf::kSeen);
    add({&m.sums[2]}, f32_bytes, RowOf::kThirdSum);
  }
  if (has_experts && dispatch) {
    add({&m.own_rows_by_expert, &m.own_weights_by_expert}, 4 * m.top_k_, RowOf::kSent);
    add({&m.sent}, input_bytes * m.top_k_, RowOf::kSent);
    add({&m.returned}, f32_bytes * m.top_k_, RowOf::kSent);
    add({&m.received}, input_bytes * m.top_k_, RowOf::kReceived);
    add({&m.outputs}, f32_bytes * m.top_k_, RowOf::kReceived);
  }
  uint64_t row_bytes = 0, sent_bytes = 0;
  for (const Width& width : m.widths_) {
    (width.row_of == RowOf::kSent ? sent_bytes : row_bytes) += static_cast<uint64_t>(width.row_bytes);
  }
  l.count_bytes = dispatch && has_experts ? static_cast<uint64_t>(4 * ranks * c.n_routed_experts) : 0;
  l.end_bytes = ranks > 1 && model.has_mtp() ? static_cast<uint64_t>(2 * ranks * f32_bytes) : 0;
  l.sub_layer_bytes = kSubLayerSlots * DeviceRing::SlotStep(plan.sub_layer_bytes_max());
  l.uneven_bytes = (kUnevenRows + 1) * sent_bytes;
  m.slot_step_ = has_experts ? DeviceRing::SlotStep(plan.expert_bytes_max()) : 0;
  m.slots_max_ = options.expert_slots;
  m.work_bytes = ForwardWorkspace::Bytes(c, model.has_mtp(), m.terms_, chunk_rows, l.logit_rows, kOfAllRows) + l.expert_room;
  l.room = {.fixed = m.work_bytes + l.sub_layer_bytes + l.count_bytes + l.end_bytes + l.uneven_bytes + 2 * kRoundingRoom,
            .row_bytes = row_bytes + CeilDiv(sent_bytes, static_cast<uint64_t>(ranks)),
            .slot_bytes = m.slot_step_,
            .rows_min = chunk_rows,
            .rows_max = options.max_rows,
            .slots_max = std::max(options.expert_slots > 0 ? options.expert_slots : c.n_routed_experts, kSlotsMin)};
  return l;
}

uint64_t SlpMemory::BytesMin(const DeviceCaps& caps, const Model& model, const WeightPlan& plan, const SlpOptions& options) {
  return SlpMemory().LayOut(caps, model, plan, options).room.bytes_min();
}

absl::StatusOr<std::unique_ptr<SlpMemory>> SlpMemory::Make(Device& device, const Model& model, const WeightPlan& plan, const SlpOptions& options) {
  auto memory = std::make_unique<SlpMemory>();
  SlpMemory& m = *memory;
  Layout l = m.LayOut(device.caps(), model, plan, options);
  const DeviceMemory use = device.memory();
  l.room.left = use.budget_bytes - use.used_bytes;
  ASSIGN_OR_RETURN(m.sizes, ChooseSlpSizes(l.room));

  ASSIGN_OR_RETURN(m.chunk, ForwardWorkspace::Make(model.config(), model.has_mtp(), device, l.chunk_rows, l.logit_rows, kOfAllRows));
  ASSIGN_OR_RETURN(m.sub_layer_slots_, device.Allocate(l.sub_layer_bytes));
  m.sub_layers = std::make_unique<DeviceRing>(device, plan.sub_layer_bytes_max());
  ASSIGN_OR_RETURN(m.shared_, device.Allocate(m.sizes.shared_bytes + l.uneven_bytes + kRoundingRoom));
  if (m.top_k_ > 0) {
    m.experts = std::make_unique<DeviceRing>(device, plan.expert_bytes_max());
    ASSIGN_OR_RETURN(m.expert_room, device.Allocate(l.expert_room));
  }
  if (l.count_bytes > 0) {
    ASSIGN_OR_RETURN(m.counts, device.Allocate(l.count_bytes));
  }
  if (l.end_bytes > 0) {
    ASSIGN_OR_RETURN(m.stripe_ends, device.Allocate(l.end_bytes));
  }
  return memory;
}

uint64_t SlpMemory::BytesOf(const Width& width, const PassShape& pass) const {
  const bool dispatched = dispatch_ && pass.ranks > 1;
  // Other ranks' sums of a rank's rows lie beside each other, and a rank may have more than its share of rows.
  const int64_t all_rows = std::max(pass.all_rows, pass.own_rows * pass.ranks);
  int64_t rows = 0;
  switch (width.row_of) {
    case RowOf::kOwn: rows = pass.own_rows; break;
    case RowOf::kSeen: rows = dispatched ? pass.own_rows : all_rows; break;
    case RowOf::kAll: rows = all_rows; break;
    case RowOf::kThirdSum: rows = dispatched || pass.ranks == 1 ? pass.own_rows : 0; break;
    case RowOf::kSent: rows = dispatched ? pass.own_rows : 0; break;
    case RowOf::kReceived: rows = dispatched ? all_rows : 0; break;
  }
  return DeviceRing::SlotStep(static_cast<uint64_t>(rows * width.row_bytes));
}

uint64_t SlpMemory::RowsBytes(const PassShape& pass) const {
  uint64_t bytes = 0;
  for (const Width& width : widths_) bytes += BytesOf(width, pass);
  return bytes;
}

bool SlpMemory::HasRoomFor(const PassShape& pass) const { return RowsBytes(pass) + kSlotsMin * slot_step_ <= shared_.bytes(); }

int64_t SlpMemory::SlotsFor(const PassShape& pass) const {
  if (slot_step_ == 0) return 0;
  const int64_t wanted = std::max(slots_max_ > 0 ? slots_max_ : pass.experts, kSlotsMin);
  return std::min(wanted, static_cast<int64_t>((shared_.bytes() - RowsBytes(pass)) / slot_step_));
}

void SlpMemory::Arrange(const PassShape& pass) {
  uint8_t* at = shared_.as<uint8_t>();
  for (const Width& width : widths_) {
    const uint64_t bytes = BytesOf(width, pass);
    *width.buffer = Buffer(at, bytes, nullptr);
    at += bytes;
  }
  sub_layers->Place(sub_layer_slots_.as<uint8_t>(), kSubLayerSlots);
  if (experts != nullptr) experts->Place(at, SlotsFor(pass));
}

void SlpMemory::PointChunkAt(int64_t first, int64_t count) {
  ForwardWorkspace& w = *chunk;
  w.token_ids = Alias(token_ids, first, count, 4);
  w.residual = Alias(residual, first, count, 4 * hidden_);
  const int64_t seen = own_begin + first;
  w.normed = Alias(normed, seen, count, 2 * terms_ * hidden_);
  if (top_k_ == 0) return;
  w.expert_ids = Alias(expert_ids, seen, count, 4 * top_k_);
  w.expert_weights = Alias(expert_weights, seen, count, 4 * top_k_);
  w.moe = Alias(sums[0], seen, count, 4 * hidden_);
}

}  // namespace hearth
