#include "services/router/http/http_session.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <boost/asio/write.hpp>
#include <boost/beast/http/error.hpp>

#include <algorithm>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "services/router/api_error.h"
#include "services/router/http/http_message.h"

namespace hearth::router {
namespace {

namespace http = boost::beast::http;
constexpr size_t kInputMax = 64 * 1024;   // of the next request, while this one is answered
constexpr size_t kDiscardMax = 64 << 20;  // of a body that was refused, before the connection is cut
constexpr uint32_t kHeaderBytesMax = 64 * 1024;

void SetOption(int fd, int level, int name, int value) { setsockopt(fd, level, name, &value, sizeof(value)); }

}  // namespace

// The handler's end. When dropped without an answer, the client still gets one.
class HttpSession::Responder final : public HttpResponder {
 public:
  explicit Responder(std::shared_ptr<HttpSession> session) : session_(std::move(session)) {}
  ~Responder() override {
    if (session_ && !answered_) session_->Reply(session_->options_->render_error(absl::InternalError("the request was dropped")));
  }
  void Reply(HttpReply reply) override {
    if (std::exchange(answered_, true)) return;
    session_->Reply(std::move(reply));
    session_ = nullptr;
  }
  void StartEvents(HttpHeaders headers) override {
    if (std::exchange(answered_, true)) return;
    session_->StartEvents(std::move(headers));
  }
  void SendEvent(std::string_view data) override {
    if (session_) session_->SendChunk(absl::StrCat("data: ", Sv(data), "\n\n"));
  }
  void EndEvents() override {
    if (session_) session_->EndEvents();
    session_ = nullptr;
  }
  void set_on_gone(std::function<void()> on_gone) override {
    if (session_) session_->on_gone_ = std::move(on_gone);
  }

 private:
  std::shared_ptr<HttpSession> session_;
  bool answered_ = false;
};

HttpSession::HttpSession(boost::asio::ip::tcp::socket socket, std::shared_ptr<const HttpServerOptions> options, std::shared_ptr<HttpHandler> handler)
    : socket_(std::move(socket)),
      options_(std::move(options)),
      handler_(std::move(handler)),
      timer_(socket_.get_executor()),
      last_sent_(absl::Now()) {}

HttpSession::~HttpSession() = default;

void HttpSession::Start() {
  const int fd = socket_.native_handle();
  SetOption(fd, IPPROTO_TCP, TCP_NODELAY, 1);
  // A cable that was pulled: 15 s of silence, then four probes 5 s apart; sent data must be acknowledged within 30 s.
  SetOption(fd, SOL_SOCKET, SO_KEEPALIVE, 1);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPIDLE, 15);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPINTVL, 5);
  SetOption(fd, IPPROTO_TCP, TCP_KEEPCNT, 4);
  SetOption(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, 30'000);
  NewParser();
  Arm(options_->keep_alive);
  Read();
}

void HttpSession::NewParser() {
  parser_.emplace();
  parser_->eager(true);
  parser_->header_limit(kHeaderBytesMax);
  parser_->body_limit(static_cast<uint64_t>(options_->max_body_bytes));
  sent_continue_ = false;
}

void HttpSession::Read() {
  if (reading_ || peer_closed_ || phase_ == Phase::kClosed) return;
  if ((phase_ == Phase::kAnswering || phase_ == Phase::kEvents) && input_.size() >= kInputMax) return;
  reading_ = true;
  socket_.async_read_some(boost::asio::buffer(read_buffer_),
                          [self = shared_from_this()](const boost::system::error_code& error, size_t bytes) { self->OnRead(error, bytes); });
}

void HttpSession::OnRead(const boost::system::error_code& error, size_t bytes) {
  reading_ = false;
  if (phase_ == Phase::kClosed) return;
  if (error == boost::asio::error::eof) {
    OnPeerClosed();
    return;
  }
  if (error) {
    Gone();
    return;
  }
  if (phase_ == Phase::kClosing) {
    discarded_ += bytes;
    if (discarded_ > kDiscardMax) {
      Close();
    } else {
      Read();
    }
    return;
  }
  input_.append(read_buffer_.data(), bytes);
  if (phase_ == Phase::kReading) {
    ExpectRest(bytes);
    Parse();
  }
  Read();
}

void HttpSession::OnPeerClosed() {
  peer_closed_ = true;
  if (phase_ == Phase::kReading) {
    // Requests that have come before the end are still to be read, and an answer may still be under way.
    if (!parse_posted_) CloseGently();
  } else if (phase_ == Phase::kClosing) {
    if (!write_pending_) Close();
  } else {
    probes_ = 0;
    Probe();
  }
}

// Bytes of the request that is being read have come: until when the rest must.
void HttpSession::ExpectRest(size_t bytes) {
  if (!parser_->got_some()) {
    request_since_ = absl::Now();
    request_bytes_ = 0;
  }
  request_bytes_ += static_cast<int64_t>(bytes);
  const double earned = static_cast<double>(request_bytes_) / static_cast<double>(options_->request_read_bytes);
  Arm(request_since_ + options_->request_read + absl::Seconds(earned) - absl::Now());
}

void HttpSession::Parse() {
  while (phase_ == Phase::kReading && !input_.empty()) {
    boost::system::error_code error;
    const size_t used = parser_->put(boost::asio::buffer(input_), error);
    input_.erase(0, used);
    if (error && error != http::error::need_more) {
      OnParseError(error);
      return;
    }
    if (parser_->is_header_done() && HasForeignCoding()) {
      // Its bytes can't be told from the next request's.
      OnParseError(http::error::bad_transfer_encoding);
      return;
    }
    if (parser_->is_done()) {
      Handle();
      return;
    }
    if (parser_->is_header_done() && !std::exchange(sent_continue_, true) &&
        absl::EqualsIgnoreCase(Sv(std::string((*parser_).get()[http::field::expect])), "100-continue")) {
      Send("HTTP/1.1 100 Continue\r\n\r\n");
    }
    if (error == http::error::need_more || used == 0) return;
  }
}

bool HttpSession::HasForeignCoding() {
  const auto coding = parser_->get()[http::field::transfer_encoding];
  return !coding.empty() && !absl::EqualsIgnoreCase(Sv(std::string(coding)), "chunked");
}

void HttpSession::OnParseError(const boost::system::error_code& error) {
  keep_alive_ = false;
  http10_ = false;
  head_only_ = false;
  phase_ = Phase::kAnswering;
  if (error == http::error::body_limit) {
    Reply(options_->render_error(HttpError(
        413, "request_too_large", absl::StrFormat("the request's body is larger than %d bytes (router.max_body_bytes)", options_->max_body_bytes))));
  } else if (error == http::error::header_limit) {
    Reply(options_->render_error(
        HttpError(431, "headers_too_large", absl::StrFormat("the request's headers are larger than %d bytes", kHeaderBytesMax))));
  } else if (error == http::error::bad_transfer_encoding) {
    Reply(options_->render_error(
        HttpError(501, "unsupported_transfer_encoding", "of the transfer codings only \"chunked\" is taken: send the body as it is")));
  } else {
    Reply(options_->render_error(HttpError(400, "bad_http", "this is no HTTP/1.1 request: " + error.message())));
  }
}

void HttpSession::Handle() {
  phase_ = Phase::kAnswering;
  Disarm();
  auto& message = parser_->get();
  HttpRequest request;
  request.method = std::string(message.method_string());
  request.target = std::string(message.target());
  request.path = NormalPath(request.target);
  for (const auto& field : message) {
    std::string& value = request.headers[absl::AsciiStrToLower(std::string(field.name_string()))];
    if (!value.empty()) value += ", ";
    value += std::string(field.value());
  }
  request.body = std::move(message.body());
  http10_ = message.version() == 10;
  keep_alive_ = message.keep_alive() && !draining_;
  head_only_ = request.method == "HEAD";
  (*handler_)(std::move(request), std::make_shared<Responder>(shared_from_this()));
}

std::string HttpSession::Head(int status, std::string_view content_type, const HttpHeaders& headers, std::optional<size_t> length) {
  std::string head = absl::StrCat("HTTP/1.1 ", status, " ", Sv(ReasonPhrase(status)), "\r\nServer: hearth\r\nDate: ", HttpDate(absl::Now()), "\r\n");
  if (!content_type.empty()) absl::StrAppend(&head, "Content-Type: ", Sv(content_type), "\r\n");
  if (length) absl::StrAppend(&head, "Content-Length: ", *length, "\r\n");
  for (const auto& [name, value] : headers) absl::StrAppend(&head, name, ": ", value, "\r\n");
  if (keep_alive_) {
    absl::StrAppend(&head, "Connection: keep-alive\r\nKeep-Alive: timeout=", absl::ToInt64Seconds(options_->keep_alive), "\r\n");
  } else {
    head += "Connection: close\r\n";
  }
  return head;
}

void HttpSession::Reply(HttpReply reply) {
  if (phase_ != Phase::kAnswering) return;
  if (options_->on_answer) options_->on_answer(reply.status);
  if (draining_) keep_alive_ = false;
  const bool bodiless = reply.status == 204 || reply.status == 304;
  std::string bytes =
      Head(reply.status, bodiless ? "" : reply.content_type, reply.headers, bodiless ? std::nullopt : std::optional(reply.body.size()));
  bytes += "\r\n";
  if (!head_only_ && !bodiless) bytes += reply.body;
  Send(std::move(bytes));
  AnswerDone();
}

void HttpSession::StartEvents(HttpHeaders headers) {
  if (phase_ != Phase::kAnswering) return;
  if (options_->on_answer) options_->on_answer(200);
  phase_ = Phase::kEvents;
  headers.emplace_back("Cache-Control", "no-cache");
  headers.emplace_back("X-Accel-Buffering", "no");  // nginx would hold the events back
  if (http10_) keep_alive_ = false;                 // no chunks there: the end is the connection's
  if (draining_) keep_alive_ = false;
  if (!http10_) headers.emplace_back("Transfer-Encoding", "chunked");
  Send(Head(200, "text/event-stream; charset=utf-8", headers, std::nullopt) + "\r\n");
  Arm(options_->comment_every);
}

void HttpSession::SendChunk(std::string_view data) {
  if (phase_ != Phase::kEvents) return;
  if (http10_) {
    Send(std::string(data));
  } else {
    Send(absl::StrFormat("%x\r\n%s\r\n", data.size(), Sv(data)));
  }
}

void HttpSession::EndEvents() {
  if (phase_ != Phase::kEvents) return;
  if (!http10_) Send("0\r\n\r\n");
  AnswerDone();
}

void HttpSession::AnswerDone() {
  on_gone_ = nullptr;
  Disarm();
  // A client that has sent all its requests and closed its side still waits for the answers.
  if (!keep_alive_ || draining_ || (peer_closed_ && input_.empty())) {
    CloseGently();
    return;
  }
  phase_ = Phase::kReading;
  NewParser();
  Arm(options_->keep_alive);
  // Behind the caller: a pipelined request must not run inside the answer of the one before it.
  parse_posted_ = true;
  boost::asio::post(socket_.get_executor(), [self = shared_from_this()] {
    self->parse_posted_ = false;
    if (self->phase_ != Phase::kReading) return;
    if (!self->input_.empty()) self->ExpectRest(self->input_.size());
    self->Parse();
    // Nothing more comes: the end of half a request, or a look now and then at a client whose next request is answered.
    if (self->peer_closed_ && self->phase_ != Phase::kClosed) self->OnPeerClosed();
    self->Read();
  });
}

void HttpSession::Send(std::string bytes) {
  if (phase_ == Phase::kClosed) return;
  last_sent_ = absl::Now();
  out_ += bytes;
  // A plain answer may be of any size; what grows without end is a stream that nobody reads.
  if (phase_ == Phase::kEvents && out_.size() > options_->unsent_bytes_max) {
    Gone();
    return;
  }
  if (!write_pending_) Write();
}

void HttpSession::Write() {
  write_pending_ = true;
  writing_ = std::exchange(out_, {});
  boost::asio::async_write(socket_, boost::asio::buffer(writing_), [self = shared_from_this()](const boost::system::error_code& error, size_t) {
    self->write_pending_ = false;
    if (self->phase_ == Phase::kClosed) return;
    if (error) {
      self->Gone();
    } else if (!self->out_.empty()) {
      self->Write();
    } else if (self->phase_ == Phase::kClosing) {
      boost::system::error_code ignored;
      self->socket_.shutdown(boost::asio::ip::tcp::socket::shutdown_send, ignored);
      if (self->peer_closed_) self->Close();
    }
  });
}

void HttpSession::Probe() {
  if (phase_ == Phase::kEvents) {
    SendChunk(":\n\n");
  } else if (phase_ == Phase::kAnswering && !http10_) {
    Send("HTTP/1.1 100 Continue\r\n\r\n");
  } else {
    return;
  }
  // The first probe makes a closed peer answer with a reset, the second finds it; then as often as is cheap.
  ++probes_;
  Arm(probes_ == 1 ? absl::Milliseconds(10) : probes_ == 2 ? absl::Milliseconds(200) : absl::Seconds(2));
}

void HttpSession::Gone() {
  if (phase_ == Phase::kClosed) return;
  const auto on_gone = std::exchange(on_gone_, nullptr);
  Close();
  if (on_gone) on_gone();
}

// Answers first, then the end: what the client still sends is read and thrown away, because closing over unread data would reset the
// connection and the client might lose the answer.
void HttpSession::CloseGently() {
  phase_ = Phase::kClosing;
  Arm(absl::Seconds(5));
  if (!write_pending_) {
    boost::system::error_code ignored;
    socket_.shutdown(boost::asio::ip::tcp::socket::shutdown_send, ignored);
    if (peer_closed_) {
      Close();
      return;
    }
  }
  Read();
}

void HttpSession::Close() {
  phase_ = Phase::kClosed;
  Disarm();
  boost::system::error_code ignored;
  socket_.close(ignored);
}

void HttpSession::Drain() {
  draining_ = true;
  if (phase_ == Phase::kReading && input_.empty() && !parser_->got_some()) Close();
}

void HttpSession::Abort() {
  on_gone_ = nullptr;
  if (phase_ != Phase::kClosed) Close();
}

void HttpSession::Arm(absl::Duration delay) {
  timer_.expires_after(absl::ToChronoNanoseconds(delay));
  timer_.async_wait([weak = weak_from_this(), armed = ++armed_](const boost::system::error_code& error) {
    if (const auto self = weak.lock(); self && !error && self->armed_ == armed) self->OnTimer();
  });
}

void HttpSession::Disarm() {
  ++armed_;
  timer_.cancel();
}

void HttpSession::OnTimer() {
  switch (phase_) {
    case Phase::kReading:
      if (parser_->got_some()) {
        keep_alive_ = false;
        phase_ = Phase::kAnswering;
        Reply(options_->render_error(HttpError(408, "request_timeout", "the rest of the request did not come in time")));
      } else {
        Close();
      }
      return;
    case Phase::kAnswering:
    case Phase::kEvents:
      if (peer_closed_) {
        Probe();
      } else if (phase_ == Phase::kEvents) {
        const absl::Duration silent = absl::Now() - last_sent_;
        if (silent >= options_->comment_every) SendChunk(": still working\n\n");
        if (phase_ == Phase::kEvents) Arm(std::max(absl::Milliseconds(10), options_->comment_every - (absl::Now() - last_sent_)));
      }
      return;
    case Phase::kClosing: Close(); return;
    case Phase::kClosed: return;
  }
}

}  // namespace hearth::router
