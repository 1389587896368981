//! Connections with bounds: what the servers of dreamc have in common.
//!
//! *In*: a listener; requests. *Out*: connections to serve; bodies. *Promise*: no more connections
//! at once than are allowed, however many arrive; a body has a bound in bytes and in time, and says
//! that it is JSON, which a page of another origin cannot send unasked; a secret is compared in a
//! time that does not tell how much of it is right.
//!
//! Routes and answers are of each server: `serve/src/http.rs`, `studio/src/http.rs`.

use bytes::Bytes;
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::{Body, Incoming};
use hyper::header::CONTENT_TYPE;
use hyper::{Request, StatusCode};
use std::future::Future;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{sleep, timeout};

/// Time between two looks at whether to stop.
const TICK: Duration = Duration::from_millis(100);

/// Takes connections until `stop`, at most `most` at once; gives those that are not over. To drop
/// them ends them.
pub async fn accept<F>(
    listener: std::net::TcpListener,
    most: usize,
    stop: &dyn Fn() -> bool,
    serve: impl Fn(TcpStream) -> F,
) -> io::Result<JoinSet<()>>
where
    F: Future<Output = ()> + Send + 'static,
{
    listener.set_nonblocking(true)?;
    let listener = TcpListener::from_std(listener)?;
    let permits = Arc::new(Semaphore::new(most.max(1)));
    let mut connections = JoinSet::new();
    while !stop() {
        while connections.try_join_next().is_some() {}
        let Ok(permit) = permits.clone().try_acquire_owned() else {
            sleep(TICK / 4).await;
            continue;
        };
        match timeout(TICK, listener.accept()).await {
            Err(_) => {}
            // So many files are open that none can be: some will be closed.
            Ok(Err(_)) => sleep(TICK).await,
            Ok(Ok((stream, _))) => {
                let served = serve(stream);
                connections.spawn(async move {
                    served.await;
                    drop(permit);
                });
            }
        }
    }
    Ok(connections)
}

/// Faults of a body.
#[derive(Debug, Error)]
pub enum BodyError {
    /// It does not say that it is JSON.
    #[error("the body must be JSON: `Content-Type: application/json`")]
    Kind,
    /// It is longer than is read.
    #[error("the body must have at most {0} bytes")]
    Large(usize),
    /// It did not arrive in time.
    #[error("the body took too long to arrive")]
    Late,
    /// The connection failed.
    #[error("the body cannot be read: {0}")]
    Broken(Box<dyn std::error::Error + Send + Sync>),
}

impl BodyError {
    /// The status of an answer that says so.
    pub fn status(&self) -> StatusCode {
        match self {
            BodyError::Kind => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            BodyError::Large(_) => StatusCode::PAYLOAD_TOO_LARGE,
            BodyError::Late => StatusCode::REQUEST_TIMEOUT,
            BodyError::Broken(_) => StatusCode::BAD_REQUEST,
        }
    }
}

/// The body of a request that says that it is JSON: bounded in bytes and in time.
///
/// # Errors
/// Where it is no such body.
pub async fn body(request: Request<Incoming>, most: usize, patience: Duration) -> Result<Bytes, BodyError> {
    let kind = request.headers().get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or("");
    if !kind.to_ascii_lowercase().starts_with("application/json") {
        return Err(BodyError::Kind);
    }
    if request.body().size_hint().lower() > most as u64 {
        return Err(BodyError::Large(most));
    }
    let collected = timeout(patience, Limited::new(request.into_body(), most).collect()).await;
    match collected.map_err(|_| BodyError::Late)? {
        Ok(body) => Ok(body.to_bytes()),
        Err(error) if error.is::<LengthLimitError>() => Err(BodyError::Large(most)),
        Err(error) => Err(BodyError::Broken(error)),
    }
}

/// The work that a request asked for ended without an answer.
#[derive(Clone, Copy, Debug, Error)]
#[error("the request could not be worked on")]
pub struct Failed;

/// Does what takes long while connections go on.
///
/// # Errors
/// Those of the work, and [`Failed`] where it ended without any.
pub async fn apart<T, E>(work: impl FnOnce() -> Result<T, E> + Send + 'static) -> Result<T, E>
where
    T: Send + 'static,
    E: From<Failed> + Send + 'static,
{
    spawn_blocking(work).await.unwrap_or_else(|_| Err(Failed.into()))
}

/// Whether a secret is the one that is given; the time tells its length alone.
pub fn same(given: &[u8], secret: &[u8]) -> bool {
    given.len() == secret.len() && given.iter().zip(secret).fold(0, |d, (a, b)| d | (a ^ b)) == 0
}

#[cfg(test)]
mod tests {
    use super::same;

    #[test]
    fn secrets_are_the_same_or_not() {
        assert!(same(b"secret", b"secret") && same(b"", b""));
        assert!(!same(b"secrex", b"secret") && !same(b"secre", b"secret") && !same(b"", b"secret"));
    }
}
