// One HTTP connection. Room: services/router; inside http/ only. Threads: the loop only.
// Owned by its own pending operations; the server holds a weak reference to close it.
#pragma once

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/steady_timer.hpp>
#include <boost/beast/http/parser.hpp>
#include <boost/beast/http/string_body.hpp>

#include <memory>
#include <optional>
#include <string>

#include "services/router/http/http_server.h"

namespace hearth::router {

class HttpSession : public std::enable_shared_from_this<HttpSession> {
 public:
  // `options` and `handler` outlive every session: the server closes them before it goes.
  HttpSession(boost::asio::ip::tcp::socket socket, std::shared_ptr<const HttpServerOptions> options, std::shared_ptr<HttpHandler> handler);
  ~HttpSession();

  void Start();
  // Idle: closes now. Busy: after the answer.
  void Drain();
  // Serves one answer more.
  void LastRequest() { draining_ = true; }
  void Abort();

 private:
  class Responder;
  using Parser = boost::beast::http::request_parser<boost::beast::http::string_body>;
  enum class Phase { kReading, kAnswering, kEvents, kClosing, kClosed };

  void Read();
  void OnRead(const boost::system::error_code& error, size_t bytes);
  void OnPeerClosed();
  void Parse();
  void ExpectRest(size_t bytes);
  void OnParseError(const boost::system::error_code& error);
  // The body comes in a transfer coding other than "chunked".
  bool HasForeignCoding();
  void Handle();
  void NewParser();

  void Reply(HttpReply reply);
  void StartEvents(HttpHeaders headers);
  void SendChunk(std::string_view data);
  void EndEvents();
  void AnswerDone();
  std::string Head(int status, std::string_view content_type, const HttpHeaders& headers, std::optional<size_t> length);

  void Send(std::string bytes);
  void Write();
  void Probe();
  void Gone();
  void CloseGently();
  void Close();
  // OnTimer after the delay, unless armed anew or disarmed before.
  void Arm(absl::Duration delay);
  void Disarm();
  void OnTimer();

  boost::asio::ip::tcp::socket socket_;
  std::shared_ptr<const HttpServerOptions> options_;
  std::shared_ptr<HttpHandler> handler_;
  boost::asio::steady_timer timer_;
  uint64_t armed_ = 0;  // rises with each Arm and Disarm: a handler of an earlier one may be in the queue already, where no cancel reaches it
  Phase phase_ = Phase::kReading;

  std::optional<Parser> parser_;
  bool sent_continue_ = false;
  absl::Time request_since_;  // its first byte
  int64_t request_bytes_ = 0;
  std::string input_;  // read, not yet parsed
  std::array<char, 16 * 1024> read_buffer_;
  bool reading_ = false;
  bool peer_closed_ = false;   // its sending side
  bool parse_posted_ = false;  // behind an answer: what has come already is about to be looked at
  size_t discarded_ = 0;       // while closing

  std::string out_;  // waits behind the write under way
  std::string writing_;
  bool write_pending_ = false;
  absl::Time last_sent_;
  int probes_ = 0;

  bool keep_alive_ = true;
  bool head_only_ = false;
  bool http10_ = false;
  bool draining_ = false;
  std::function<void()> on_gone_;
};

}  // namespace hearth::router
