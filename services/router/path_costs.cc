#include "services/router/path_costs.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"

namespace hearth::router {
namespace {

constexpr size_t kExtrasKept = 16;
constexpr double kExtraMax = 0.1;

}  // namespace

void PathCosts::StartFrom(const std::string& way, const PassCost& cost, bool shape_only) {
  starts_[way] = {cost, shape_only};
  for (auto& [name, worker] : workers_) {
    if (const auto fit = worker.fits.find(way); fit != worker.fits.end()) fit->second.StartFrom(cost, shape_only);
  }
}

void PathCosts::OnWorkerStatus(const std::string& name, const v1::WorkerStatus& status) {
  if (status.prompts().path().empty()) return;
  Worker& worker = workers_[name];
  if (worker.generation != status.generation()) {
    // Other weights cost something else. What they should cost is for the next StartFrom to say.
    worker.generation = status.generation();
    worker.fits.clear();
  }
  if (worker.pid != status.pid()) {
    worker.pid = status.pid();
    worker.last_pass = 0;
  }
  worker.way = absl::StrCat(status.kind(), " ", status.prompts().path());
  const auto [at, is_new] = worker.fits.try_emplace(worker.way);
  if (const auto start = starts_.find(worker.way); is_new && start != starts_.end())
    at->second.StartFrom(start->second.cost, start->second.shape_only);
  for (const v1::WorkerStatus::Prompts::Pass& pass : status.prompts().passes()) {
    if (pass.number() <= worker.last_pass) continue;
    worker.last_pass = pass.number();
    if (pass.ranks() > 1) worker.shared_way = absl::StrCat(worker.way, " x", pass.ranks());
    PassFit& fit = pass.ranks() > 1 ? worker.fits[worker.shared_way] : at->second;
    fit.Add(
        {.work = {.tokens = static_cast<double>(pass.tokens()), .positions = pass.positions()}, .seconds = pass.seconds() - pass.waited_seconds()});
  }
}

std::string PathCosts::WayOf(const std::string& worker) const {
  const auto at = workers_.find(worker);
  return at == workers_.end() ? "" : at->second.way;
}

std::optional<PassCost> PathCosts::CostOf(const std::string& worker) const {
  const auto at = workers_.find(worker);
  if (at == workers_.end()) return std::nullopt;
  return at->second.fits.at(at->second.way).cost();
}

std::optional<PassCost> PathCosts::SharedCostOf(const std::string& worker) const {
  const auto at = workers_.find(worker);
  if (at == workers_.end()) return std::nullopt;
  const auto fit = at->second.fits.find(at->second.shared_way);
  return fit == at->second.fits.end() ? std::nullopt : fit->second.cost();
}

double PathCosts::ExtraSeconds(const std::string& way) const {
  const auto at = predictions_.find(way);
  if (at == predictions_.end()) return 0;
  std::vector<double> sorted(at->second.extra_s.begin(), at->second.extra_s.end());
  std::sort(sorted.begin(), sorted.end());
  return std::clamp(sorted[sorted.size() / 2], 0.0, kExtraMax);
}

void PathCosts::OnFirstToken(const std::string& way, double predicted_s, double extra_s, double real_s) {
  if (!(predicted_s > 0) || !(real_s > 0)) return;
  Predictions& of_way = predictions_[way];
  of_way.ratio.Add(real_s / predicted_s);
  of_way.error.Add(std::abs(real_s - predicted_s) / real_s);
  of_way.extra_s.push_back(real_s - (predicted_s - extra_s));
  if (of_way.extra_s.size() > kExtrasKept) of_way.extra_s.pop_front();
}

std::vector<PathCosts::Line> PathCosts::lines() const {
  std::vector<Line> lines;
  for (const auto& [name, worker] : workers_) {
    for (const std::string& way : {worker.way, worker.shared_way}) {
      const auto fit = worker.fits.find(way);
      if (fit == worker.fits.end()) continue;
      if (const std::optional<PassCost> cost = fit->second.cost()) lines.push_back({name, way, *cost, fit->second.passes_seen()});
    }
  }
  return lines;
}

std::vector<PathCosts::Trust> PathCosts::trust() const {
  std::vector<Trust> trust;
  for (const auto& [way, p] : predictions_) {
    trust.push_back({way, p.ratio.count(), p.ratio.Percentile(0.5), p.error.Percentile(0.5), p.error.Percentile(0.9)});
  }
  return trust;
}

}  // namespace hearth::router
