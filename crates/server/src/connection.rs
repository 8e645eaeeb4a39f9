//! Connections: accepting them, their deadlines, and how they end.
//!
//! hyper's own header deadline also runs between two requests, and none watches
//! a client that stops reading. So the socket is wrapped ([`Timed`]) and told by
//! the service what the connection is doing ([`Activity`]):
//!
//! ```text
//! accepted ─→ Reading ─→ Busy ─→ Waiting ─→ Reading ─→ …
//!             header_    (none)  idle_
//!             timeout            timeout      and write_timeout whenever bytes wait
//! ```
//!
//! A connection that rests may be closed for a new one ([`crate::resting`]). One that becomes a
//! WebSocket stays busy to its end, and whoever serves the socket holds its [`Tenure`].
//!
//! HTTP/1.1 only: a proxy that speaks more talks to us in it anyway.

use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{Response, StatusCode};
use hyper::body::{Frame, Incoming, SizeHint};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Notify, OwnedSemaphorePermit, mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{Instant, Sleep, sleep, sleep_until};
use tower_service::Service;

use crate::limits::{HEADER_BYTES_MAX, Limits};
use crate::resting::{Door, Resting};
use crate::turns::Client;

/// Headers of a request.
const HEADERS_MAX: usize = 100;

/// How far the server is with its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stage {
    /// Taking requests.
    Serving,
    /// Finishing those that run; taking no more.
    Draining,
    /// Ending those that still run.
    Stopping,
}

/// The place of a connection among those that are served, for what goes on after HTTP: as long as
/// it is held, the connection counts, and a shutdown waits for it.
#[derive(Clone)]
pub(crate) struct Tenure {
    /// How far the server is.
    pub(crate) stage: watch::Receiver<Stage>,
    _held: mpsc::Sender<()>,
}

/// Accepts connections and serves `router` on them until `shutdown` resolves
/// and what then ran has ended.
///
/// Connections are accepted to the end: while the server drains, a probe is told
/// so, and a request is refused with words instead of a closed port.
pub(crate) async fn run(
    listener: TcpListener,
    router: Router,
    limits: &Limits,
    stage: &watch::Sender<Stage>,
    shutdown: impl Future<Output = ()>,
) {
    let mut shutdown = pin!(shutdown);
    let mut door = Door::new(listener, limits.connections);
    let resting = door.resting().clone();
    let spawn = |tasks: &mut JoinSet<()>, is_late, accepted| {
        let (stream, slot): (TcpStream, OwnedSemaphorePermit) = accepted;
        let serve = serve(
            stream,
            router.clone(),
            limits.clone(),
            stage.subscribe(),
            Activity::new(resting.clone()),
            is_late,
        );
        tasks.spawn(async move {
            serve.await;
            drop(slot);
        });
    };
    let mut tasks = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = &mut shutdown => break,
            Some(_) = tasks.join_next() => {}
            accepted = door.accept() => spawn(&mut tasks, false, accepted),
        }
    }
    tracing::info!(connections = tasks.len(), "draining");
    stage.send_replace(Stage::Draining);
    let mut late = JoinSet::new();
    let acts = [
        (limits.drain_timeout, "cancelling what still runs"),
        (limits.cancel_grace, "dropping what still runs"),
    ];
    for (patience, act) in acts {
        let deadline = sleep(patience);
        tokio::pin!(deadline);
        loop {
            tokio::select! {
                biased;
                ended = tasks.join_next() => if ended.is_none() { return },
                Some(_) = late.join_next() => {}
                () = &mut deadline => break,
                accepted = door.accept() => spawn(&mut late, true, accepted),
            }
        }
        tracing::warn!(connections = tasks.len(), "{act}");
        stage.send_replace(Stage::Stopping);
    }
}

/// Serves one connection to its end.
async fn serve(
    stream: TcpStream,
    router: Router,
    limits: Limits,
    stage: watch::Receiver<Stage>,
    activity: Activity,
    is_late: bool,
) {
    // Tokens are small and must not wait for one another.
    let _ = stream.set_nodelay(true);
    let _leave = Leave(activity.clone());
    let address = stream.peer_addr().ok();
    let client = Arc::new(Client::new(address.map(|address| address.ip())));
    let (held, mut released) = mpsc::channel(1);
    let tenure = Tenure {
        stage: stage.clone(),
        _held: held,
    };
    let service = service_fn({
        let activity = activity.clone();
        move |mut request: hyper::Request<Incoming>| {
            activity.enter(Doing::Busy);
            request.extensions_mut().insert(client.clone());
            request.extensions_mut().insert(tenure.clone());
            let activity = activity.clone();
            let answer = router.clone().call(request);
            async move {
                answer.await.map(|response: Response<Body>| {
                    let is_socket = response.status() == StatusCode::SWITCHING_PROTOCOLS;
                    let activity = (!is_socket).then_some(activity);
                    response.map(|body| Tracked { body, activity })
                })
            }
        }
    });
    serve_http(stream, service, activity, &limits, stage, is_late).await;
    // Nothing arrives: it ends when the last tenure does.
    let _ = released.recv().await;
}

/// Serves the requests of one connection, until it ends or becomes a WebSocket.
async fn serve_http<S>(
    stream: TcpStream,
    service: S,
    activity: Activity,
    limits: &Limits,
    mut stage: watch::Receiver<Stage>,
    is_late: bool,
) where
    S: hyper::service::HttpService<Incoming, ResBody = Tracked, Error = Infallible>,
{
    let close = activity.close.clone();
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        // A connection that comes while the server drains has one request.
        .keep_alive(!is_late)
        // `Timed` is stricter before a request and the same after one.
        .header_read_timeout(limits.idle_timeout.max(limits.header_timeout))
        // Names are the same in any case; some clients and proxies look for this one.
        .title_case_headers(true)
        .max_headers(HEADERS_MAX)
        .max_header_size(HEADER_BYTES_MAX)
        .serve_connection(TokioIo::new(Timed::new(stream, activity, limits)), service)
        .with_upgrades();
    let mut connection = pin!(connection);
    let mut is_draining = is_late;
    loop {
        tokio::select! {
            ended = &mut connection => {
                if let Err(error) = ended {
                    tracing::debug!(%error, "connection ended");
                }
                return;
            }
            _ = stage.wait_for(|&stage| stage > Stage::Serving), if !is_draining => {
                is_draining = true;
                connection.as_mut().graceful_shutdown();
            }
            () = close.notified() => {
                tracing::debug!("an idle connection is closed for a new one");
                return;
            }
        }
    }
}

/// What a connection is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Doing {
    /// Receiving a request's headers, or about to receive its first.
    Reading,
    /// Answering.
    Busy,
    /// Waiting for the next request.
    Waiting,
}

/// What a connection is doing, and since when.
#[derive(Clone, Debug)]
struct Activity {
    state: Arc<Mutex<State>>,
    resting: Arc<Resting>,
    /// Told when the connection is to end for another one.
    close: Arc<Notify>,
}

#[derive(Clone, Copy, Debug)]
struct State {
    doing: Doing,
    since: Instant,
    /// Place among those that rest: no byte of a request is there, and all of the last
    /// answer is with the system.
    place: Option<u64>,
}

impl Activity {
    /// The activity of a connection that has just come, and rests.
    fn new(resting: Arc<Resting>) -> Self {
        let close = Arc::<Notify>::default();
        let state = State {
            doing: Doing::Reading,
            since: Instant::now(),
            place: Some(resting.join(close.clone())),
        };
        Activity {
            state: Arc::new(Mutex::new(state)),
            resting,
            close,
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> State {
        *self.state()
    }

    /// Notes what the connection does now.
    fn enter(&self, doing: Doing) {
        self.wake();
        let mut state = self.state();
        (state.doing, state.since) = (doing, Instant::now());
    }

    /// Notes that an answer has been sent as far as the system: the connection may rest.
    fn rest(&self) {
        let mut state = self.state();
        if state.doing == Doing::Waiting && state.place.is_none() {
            state.place = Some(self.resting.join(self.close.clone()));
        }
    }

    /// Ends the rest, if there is one; false if the connection has been told to end.
    fn wake(&self) -> bool {
        let place = self.state().place.take();
        place.is_none_or(|place| self.resting.leave(place))
    }
}

/// Ends the rest of a connection that ends.
struct Leave(Activity);

impl Drop for Leave {
    fn drop(&mut self) {
        self.0.wake();
    }
}

/// A response body that says when it has been sent, or dropped.
struct Tracked {
    body: Body,
    /// Nothing for the answer after which the connection is a WebSocket: it stays busy.
    activity: Option<Activity>,
}

impl Drop for Tracked {
    fn drop(&mut self) {
        if let Some(activity) = &self.activity {
            activity.enter(Doing::Waiting);
        }
    }
}

impl hyper::body::Body for Tracked {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A socket with deadlines.
struct Timed<S> {
    socket: S,
    activity: Activity,
    header_timeout: Duration,
    idle_timeout: Duration,
    write_timeout: Duration,
    read_alarm: Pin<Box<Sleep>>,
    /// Set while the other side does not take what is written.
    write_alarm: Option<Pin<Box<Sleep>>>,
}

impl<S> Timed<S> {
    fn new(socket: S, activity: Activity, limits: &Limits) -> Self {
        Timed {
            socket,
            activity,
            header_timeout: limits.header_timeout,
            idle_timeout: limits.idle_timeout,
            write_timeout: limits.write_timeout,
            read_alarm: Box::pin(sleep(limits.header_timeout)),
            write_alarm: None,
        }
    }

    /// Passes on what a write has come to, or fails if it has been pending too long.
    fn watch_write(
        &mut self,
        cx: &mut Context<'_>,
        written: Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if written.is_ready() {
            self.write_alarm = None;
            return written;
        }
        let alarm = self
            .write_alarm
            .get_or_insert_with(|| Box::pin(sleep(self.write_timeout)));
        ready!(alarm.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "the client does not read",
        )))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Timed<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let State {
            doing,
            since,
            place,
        } = this.activity.now();
        let read = Pin::new(&mut this.socket).poll_read(cx, buf);
        let deadline = match doing {
            _ if read.is_ready() => {
                if place.is_some() && !this.activity.wake() {
                    return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
                }
                if doing == Doing::Waiting {
                    this.activity.enter(Doing::Reading);
                }
                return read;
            }
            Doing::Busy => return Poll::Pending,
            Doing::Reading => since + this.header_timeout,
            Doing::Waiting => since + this.idle_timeout,
        };
        if this.read_alarm.deadline() != deadline {
            this.read_alarm.set(sleep_until(deadline));
        }
        ready!(this.read_alarm.as_mut().poll(cx));
        Poll::Ready(Err(io::Error::new(
            io::ErrorKind::TimedOut,
            "no request in time",
        )))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Timed<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write(cx, buf);
        self.watch_write(cx, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.socket).poll_write_vectored(cx, bufs);
        self.watch_write(cx, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.socket).poll_flush(cx);
        if flushed.is_ready() {
            self.activity.rest();
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex};

    fn timed(capacity: usize) -> (DuplexStream, Timed<DuplexStream>) {
        let (client, server) = duplex(capacity);
        let limits = Limits {
            header_timeout: Duration::from_millis(50),
            idle_timeout: Duration::from_millis(200),
            write_timeout: Duration::from_millis(50),
            ..Limits::default()
        };
        (
            client,
            Timed::new(server, Activity::new(Arc::default()), &limits),
        )
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_stops_reading_is_dropped() {
        let (client, mut server) = timed(8);
        let start = Instant::now();
        let error = within(server.write_all(&[0; 64])).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(start.elapsed() >= Duration::from_millis(50));
        drop(client);

        // One that reads slowly, but reads, is not.
        let (mut client, mut server) = timed(8);
        let read = async {
            for _ in 0..8 {
                sleep(Duration::from_millis(20)).await;
                client.read_exact(&mut [0; 8]).await.unwrap();
            }
        };
        let (written, ()) = tokio::join!(server.write_all(&[0; 64]), read);
        written.unwrap();
    }

    /// What ought to end by itself.
    async fn within<T>(future: impl Future<Output = T>) -> T {
        let patience = Duration::from_secs(10);
        tokio::time::timeout(patience, future)
            .await
            .expect("no hang")
    }

    #[tokio::test(start_paused = true)]
    async fn each_phase_has_its_own_deadline() {
        let (mut client, mut server) = timed(64);
        let mut byte = [0];
        let start = Instant::now();
        assert!(within(server.read(&mut byte)).await.is_err());
        assert!(start.elapsed() < Duration::from_millis(150));

        server.activity.enter(Doing::Busy);
        let busy = tokio::time::timeout(Duration::from_millis(300), server.read(&mut byte));
        assert!(busy.await.is_err(), "an answer has no read deadline");

        server.activity.enter(Doing::Waiting);
        let start = Instant::now();
        assert!(within(server.read(&mut byte)).await.is_err());
        assert!(start.elapsed() >= Duration::from_millis(200));

        // The first byte of a request starts the shorter deadline.
        server.activity.enter(Doing::Waiting);
        client.write_all(b"G").await.unwrap();
        server.read_exact(&mut byte).await.unwrap();
        let start = Instant::now();
        assert!(within(server.read(&mut byte)).await.is_err());
        assert!(start.elapsed() < Duration::from_millis(150));
    }
}
