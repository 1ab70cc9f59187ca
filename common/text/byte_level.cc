// See byte_level.h.
#include "common/text/byte_level.h"

#include <array>

#include "common/text/utf8.h"

namespace hearth {
namespace {

constexpr char32_t kAlphabetEnd = 0x100 + 68;

struct Alphabet {
  std::array<std::string, 256> spelling;
  std::array<int16_t, kAlphabetEnd> byte_of;  // -1: not in the alphabet
};

Alphabet MakeAlphabet() {
  Alphabet alphabet;
  alphabet.byte_of.fill(-1);
  char32_t next_substitute = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable = (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    const char32_t character = printable ? static_cast<char32_t>(byte) : next_substitute++;
    AppendUtf8(character, &alphabet.spelling[byte]);
    alphabet.byte_of[character] = static_cast<int16_t>(byte);
  }
  return alphabet;
}

const Alphabet& GetAlphabet() {
  static const Alphabet alphabet = MakeAlphabet();
  return alphabet;
}

}  // namespace

std::string_view ByteLevelCharacter(uint8_t byte) { return GetAlphabet().spelling[byte]; }

std::string ToByteLevel(std::string_view bytes) {
  std::string out;
  out.reserve(bytes.size() * 2);
  for (const char c : bytes) out += ByteLevelCharacter(static_cast<uint8_t>(c));
  return out;
}

std::optional<std::string> FromByteLevel(std::string_view spelling) {
  const Alphabet& alphabet = GetAlphabet();
  std::string out;
  out.reserve(spelling.size());
  for (size_t position = 0; position < spelling.size();) {
    const char32_t character = DecodeUtf8(spelling, &position);
    if (character >= kAlphabetEnd || alphabet.byte_of[character] < 0) return std::nullopt;
    out.push_back(static_cast<char>(alphabet.byte_of[character]));
  }
  return out;
}

}  // namespace hearth
