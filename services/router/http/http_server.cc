#include "services/router/http/http_server.h"

#include <boost/asio/ip/tcp.hpp>
#include <boost/asio/ip/v6_only.hpp>

#include <algorithm>

#include "common/base/logging.h"
#include "services/router/http/http_session.h"
#include "services/router/http/listen_address.h"

namespace hearth::router {
namespace {

using boost::asio::ip::tcp;

class Server final : public HttpServer {
 public:
  Server(EventLoop* loop, HttpServerOptions options, HttpHandler handler)
      : loop_(loop),
        options_(std::make_shared<const HttpServerOptions>(std::move(options))),
        handler_(std::make_shared<HttpHandler>(std::move(handler))) {}
  ~Server() override {
    *alive_ = false;
    for (auto& listener : listeners_) {
      boost::system::error_code ignored;
      listener->acceptor.close(ignored);
      listener->retry.reset();
    }
    *handler_ = nullptr;
    for (const auto& weak : sessions_) {
      if (const auto session = weak.lock()) session->Abort();
    }
  }

  absl::Status Listen(const std::vector<std::string>& listen) {
    for (const std::string& text : listen) {
      ASSIGN_OR_RETURN(const ListenHost host, ParseListen(text, kHttpPort));
      ASSIGN_OR_RETURN(const std::vector<NumericAddress> addresses, ResolveListen(host));
      uint16_t port = host.port;  // with port 0 the first address draws one and the others take the same
      for (const NumericAddress& address : addresses) RETURN_IF_ERROR(Annotate(Bind(address, &port), absl::StrCat("listening on ", text)));
    }
    for (const auto& listener : listeners_) Accept(listener.get());
    return absl::OkStatus();
  }

  const std::vector<std::string>& addresses() const override { return addresses_; }

  void Drain() override {
    draining_ = true;
    for (const auto& weak : sessions_) {
      if (const auto session = weak.lock()) session->Drain();
    }
  }

  size_t connections() const override {
    return static_cast<size_t>(std::count_if(sessions_.begin(), sessions_.end(), [](const auto& weak) { return !weak.expired(); }));
  }

 private:
  struct Listener {
    explicit Listener(boost::asio::io_context& io) : acceptor(io) {}
    tcp::acceptor acceptor;
    std::shared_ptr<void> retry;  // its own: with one for all, the second to fail would drop the first one's for ever
  };

  absl::Status Bind(const NumericAddress& address, uint16_t* port) {
    boost::system::error_code error;
    const auto ip = boost::asio::ip::make_address(address.ip, error);
    if (error) return absl::InvalidArgumentError(absl::StrCat(address.ip, ": ", error.message()));
    auto listener = std::make_unique<Listener>(loop_->io());
    tcp::acceptor& acceptor = listener->acceptor;
    const tcp::endpoint endpoint(ip, *port);
    acceptor.open(endpoint.protocol(), error);
    if (!error) acceptor.set_option(tcp::acceptor::reuse_address(true), error);
    // "[::]" takes IPv4 too, as people expect of it; any other address is one family's.
    if (!error && ip.is_v6()) acceptor.set_option(boost::asio::ip::v6_only(!ip.is_unspecified()), error);
    if (!error) acceptor.bind(endpoint, error);
    if (!error) acceptor.listen(1024, error);
    if (error) return ListenError(address, *port, error.value());
    *port = acceptor.local_endpoint(error).port();
    addresses_.push_back(FormatAddress(address, *port));
    listeners_.push_back(std::move(listener));
    return absl::OkStatus();
  }

  void Accept(Listener* listener) {
    listener->acceptor.async_accept([this, listener, alive = alive_](const boost::system::error_code& error, tcp::socket socket) {
      // One that was accepted just before the end still comes here after it.
      if (!*alive || error == boost::asio::error::operation_aborted) return;
      if (error) {
        // Out of file descriptors or memory: give back some time instead of spinning.
        if (const auto permit = LogAllowed("accept", 5)) spdlog::warn("a connection could not be accepted: {}", error.message());
        listener->retry = loop_->After(absl::Milliseconds(100), [this, listener] { Accept(listener); });
        return;
      }
      auto session = std::make_shared<HttpSession>(std::move(socket), options_, handler_);
      if (sessions_.size() >= prune_at_) {
        sessions_.erase(std::remove_if(sessions_.begin(), sessions_.end(), [](const auto& weak) { return weak.expired(); }), sessions_.end());
        prune_at_ = std::max<size_t>(64, 2 * sessions_.size());
      }
      sessions_.push_back(session);
      if (draining_) session->LastRequest();
      session->Start();
      Accept(listener);
    });
  }

  EventLoop* loop_;
  std::shared_ptr<const HttpServerOptions> options_;
  std::shared_ptr<HttpHandler> handler_;
  std::vector<std::unique_ptr<Listener>> listeners_;
  std::vector<std::string> addresses_;
  std::vector<std::weak_ptr<HttpSession>> sessions_;
  size_t prune_at_ = 64;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
  bool draining_ = false;
};

}  // namespace

const std::string& HttpRequest::Header(const std::string& lower_name) const {
  static const std::string kEmpty;
  const auto at = headers.find(lower_name);
  return at == headers.end() ? kEmpty : at->second;
}

absl::StatusOr<std::unique_ptr<HttpServer>> HttpServer::Start(EventLoop* loop, const std::vector<std::string>& listen, HttpServerOptions options,
                                                              HttpHandler handler) {
  auto server = std::make_unique<Server>(loop, std::move(options), std::move(handler));
  RETURN_IF_ERROR(server->Listen(listen));
  return server;
}

}  // namespace hearth::router
