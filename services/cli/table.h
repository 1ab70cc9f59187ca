// Plain tables for terminals: columns as wide as their widest cell, numbers to the right.
// Room: services/cli.
#pragma once

#include <algorithm>
#include <ostream>
#include <string>
#include <vector>

namespace hearth {

class Table {
 public:
  explicit Table(std::vector<std::string> header) : rows_{std::move(header)} {}
  void Add(std::vector<std::string> row) { rows_.push_back(std::move(row)); }
  bool empty() const { return rows_.size() == 1; }

  void Print(std::ostream& out) const {
    std::vector<size_t> width(rows_.front().size(), 0);
    for (const auto& row : rows_) {
      for (size_t c = 0; c < row.size(); ++c) width[c] = std::max(width[c], row[c].size());
    }
    for (const auto& row : rows_) {
      std::string line = "  ";
      for (size_t c = 0; c < row.size(); ++c) {
        const std::string pad(width[c] - row[c].size(), ' ');
        const bool number = &row != &rows_.front() && !row[c].empty() && row[c].front() >= '0' && row[c].front() <= '9';
        line += number ? pad + row[c] : row[c] + pad;
        line += "  ";
      }
      line.erase(line.find_last_not_of(' ') + 1);
      out << line << "\n";
    }
  }

 private:
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace hearth
