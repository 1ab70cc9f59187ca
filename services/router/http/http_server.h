// HTTP/1.1 over TCP: connections, keep-alive, bodies, event streams. Knows nothing of models.
// Room: services/router. May touch: Boost.Asio and Beast. Threads: the loop only.
//
// A connection runs one request at a time and is read all the while, so that a client's going away is seen at once: a reset or an error
// ends the request. The end of the client's sending side alone does not (it may have half-closed): from then on the connection is probed
// with bytes that a client must ignore - a comment in an event stream, "100 Continue" before a plain answer - which a closed socket refuses.
// Clients that vanish without a word are found by TCP keep-alive and by the limit on unacknowledged data.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "common/base/status.h"
#include "services/router/event_loop.h"

namespace hearth::router {

struct HttpRequest {
  std::string method;
  std::string target;                          // as sent
  std::string path;                            // decoded, without query, double slashes and trailing slash
  std::map<std::string, std::string> headers;  // lower-case names
  std::string body;

  const std::string& Header(const std::string& lower_name) const;
};

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

struct HttpReply {
  int status = 200;
  std::string content_type = "application/json";
  std::string body;
  HttpHeaders headers;
};

// The way back to one request's client. Exactly one Reply, or one StartEvents and one EndEvents. Once the client is gone, all are no-ops.
class HttpResponder {
 public:
  virtual ~HttpResponder() = default;
  virtual void Reply(HttpReply reply) = 0;
  // 200, text/event-stream; comments keep it alive while nothing is sent.
  virtual void StartEvents(HttpHeaders headers) = 0;
  virtual void SendEvent(std::string_view data) = 0;  // "data: <data>\n\n"
  virtual void EndEvents() = 0;
  // Called at most once, when the client is gone before the answer ended.
  virtual void set_on_gone(std::function<void()> on_gone) = 0;
};

using HttpHandler = std::function<void(HttpRequest request, std::shared_ptr<HttpResponder> responder)>;

struct HttpServerOptions {
  int64_t max_body_bytes = 8 << 20;
  absl::Duration keep_alive = absl::Seconds(120);  // idle connections
  // A request must be here so long after its first byte, plus a second for each `request_read_bytes` that have come: whoever sends less than
  // that in a second, for ever, does not hold a connection and its buffer for ever.
  absl::Duration request_read = absl::Seconds(60);
  int64_t request_read_bytes = 64 * 1024;
  absl::Duration comment_every = absl::Seconds(5);  // in a silent event stream
  size_t unsent_bytes_max = SIZE_MAX;               // a client that takes less is dropped
  std::function<HttpReply(const absl::Status&)> render_error;
  std::function<void(int status)> on_answer;
};

class HttpServer {
 public:
  // Listens on all addresses of `listen` or on none. Errors name the address: Unavailable (in use, absent), InvalidArgument (unreadable).
  static absl::StatusOr<std::unique_ptr<HttpServer>> Start(EventLoop* loop, const std::vector<std::string>& listen, HttpServerOptions options,
                                                           HttpHandler handler);
  virtual ~HttpServer() = default;  // closes every connection; on the loop or after it
  virtual const std::vector<std::string>& addresses() const = 0;
  // Idle connections close, others after their answer, which says so; new ones are still served one answer.
  virtual void Drain() = 0;
  virtual size_t connections() const = 0;
};

}  // namespace hearth::router
