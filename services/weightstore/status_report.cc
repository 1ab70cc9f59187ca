// Where pages lie is asked of the kernel for a sample of each segment (move_pages without moving), so that it costs milliseconds.
#include "services/weightstore/status_report.h"

#include <algorithm>

#include "common/numa/placement.h"
#include "common/rpc/disk_reads.h"
#include "common/rpc/rpc.h"
#include "services/weightstore/attach_reactor.h"

namespace hearth {
namespace {

constexpr uint64_t kSamplesPerSegment = 256;

void FillGeneration(const Generations& generations, const Generation& g, int32_t leases, v1::StoreStatus* status) {
  v1::StoreStatus::Generation& out = *status->add_generations();
  out.set_id(ToBytes(g.id));
  out.set_state(g.superseded ? "READY, superseded" : "READY");
  out.set_model_dir(g.image->model_dir());
  out.set_fingerprint(ToBytes(g.image->fingerprint()));
  out.set_bytes(g.image->total_bytes());
  out.set_disk_bytes(g.image->disk_bytes());
  out.set_disk_dir(g.image->disk_dir());
  out.set_leases(leases);
  out.set_adopted(g.adopted);
  std::vector<uint64_t> per_node;
  const std::vector<uint64_t> segments = g.image->segment_bytes();
  for (size_t k = 0; k < segments.size(); ++k) {
    out.add_segment_bytes(segments[k]);
    absl::StatusOr<ShmRegion> region = ShmRegion::Open(generations.place().Path(SegmentWhat(static_cast<int64_t>(k)), g.id), RegionKind::kSegment,
                                                       kSegmentVersion, MapMode::kReadOnly);
    if (!region.ok() || segments[k] == 0) continue;
    const auto sampled = SamplePagesPerNode(region->body(), std::min<uint64_t>(region->body_bytes(), segments[k]), kSamplesPerSegment);
    if (!sampled.ok()) {
      status->add_notes(absl::StrCat("where the pages of the weights lie is not known: ", sampled.status().message()));
      continue;
    }
    uint64_t total = 0;
    for (const auto& [node, pages] : *sampled) total += pages;
    for (const auto& [node, pages] : *sampled) {
      if (node < 0 || total == 0) continue;
      if (per_node.size() <= static_cast<size_t>(node)) per_node.resize(static_cast<size_t>(node) + 1, 0);
      per_node[static_cast<size_t>(node)] +=
          static_cast<uint64_t>(static_cast<double>(segments[k]) * static_cast<double>(pages) / static_cast<double>(total));
    }
  }
  for (const uint64_t bytes : per_node) out.add_bytes_per_node(bytes);
}

}  // namespace

void FillStatus(Store& store, v1::StoreStatus* status) {
  Generations& generations = store.generations();
  for (const std::string& note : generations.notes()) status->add_notes(note);
  const std::vector<GenerationPtr> all = generations.All();
  for (const GenerationPtr& g : all) {
    int32_t live = 0;
    for (const PageTable::Lease& lease : g->pages->Leases()) {
      v1::StoreStatus::Lease& out = *status->add_leases();
      const LeaseWatch::View view = store.Look(lease.id);
      out.set_id(lease.id);
      out.set_kind(static_cast<v1::WorkerKind>(lease.spec.kind));
      out.set_name(lease.spec.name);
      out.set_pid(lease.spec.process.pid);
      out.set_generation(ToBytes(g->id));
      out.set_state(lease.state == LeaseState::kDead ? "dead" : view.suspect ? "suspect" : "live");
      out.set_rows(static_cast<int32_t>(lease.rows));
      out.set_seconds_since_beat(view.seconds_since_beat);
      live += lease.state == LeaseState::kLive ? 1 : 0;
    }
    FillGeneration(generations, *g, live, status);
  }
  for (const Store::RouterView& router : store.Routers()) {
    v1::StoreStatus::Lease& out = *status->add_leases();
    out.set_id(router.lease_id);
    out.set_kind(v1::WORKER_KIND_ROUTER);
    out.set_name(router.name);
    out.set_pid(router.process.pid);
    out.set_state("live");
    out.set_seconds_since_beat(router.seconds_since_beat);
  }
  for (const RingKeeper::View& view : store.Rings()) {
    v1::StoreStatus::Ring& out = *status->add_rings();
    out.set_lease_id(view.lease);
    out.set_worker(view.worker);
    out.set_shard(static_cast<int32_t>(view.ring.shard));
    out.set_slots(static_cast<int32_t>(view.ring.slots));
    out.set_bytes(view.ring.bytes);
    out.set_records(view.ring.records);
    out.set_record_bytes(view.ring.record_bytes);
    if (view.ring.busy_seconds > 0) out.set_bytes_per_second(static_cast<double>(view.ring.record_bytes) / view.ring.busy_seconds);
    out.set_broken(view.ring.broken);
    if (view.ring.disk.has_value()) Tell(*view.ring.disk, *out.mutable_disk());
  }
  for (const GroupKeeper::View& view : store.Groups()) {
    v1::StoreStatus::Group& out = *status->add_groups();
    out.set_id(view.id);
    for (const std::string& worker : view.workers) out.add_workers(worker);
    out.set_bytes(view.bytes);
    out.set_state(view.over ? "over" : view.id == 0 ? "waiting" : "whole");
  }
  if (!all.empty()) {
    const Generation& newest = *all.back();
    const PageTable::Counts counts = newest.pages->Count();
    v1::StoreStatus::Pool& pool = *status->mutable_pool();
    pool.set_pages_total(static_cast<uint64_t>(counts.total));
    pool.set_pages_free(static_cast<uint64_t>(counts.free));
    pool.set_pages_open(static_cast<uint64_t>(counts.open));
    pool.set_pages_sealed_referenced(static_cast<uint64_t>(counts.sealed_referenced));
    pool.set_pages_sealed_cached(static_cast<uint64_t>(counts.sealed_cached));
    pool.set_bytes(static_cast<uint64_t>(counts.total) * newest.pool->geometry().page_bytes());
    pool.set_rows(static_cast<uint64_t>(counts.rows));
  }
  if (const LoadState loading = generations.loading(); loading.active) FillLoadEvent(loading, status->mutable_loading());
}

}  // namespace hearth
