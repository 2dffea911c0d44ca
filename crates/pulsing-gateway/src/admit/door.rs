//! Who is let in: API keys from a file that is read again when it changes, or from the environment.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arc_swap::ArcSwapOption;
use hyper::header::{self, HeaderMap, HeaderName};

use super::account::{Account, Client};
use super::keys::Ring;
use crate::api::ApiError;
use crate::config::{GatewayConfig, GatewayError};
use crate::files::{self, Watched};

const X_API_KEY: HeaderName = HeaderName::from_static("x-api-key");
/// What the one key of the environment is called in logs.
const OF_THE_ENVIRONMENT: &str = "default";
/// Who asks where there are no keys.
const ANYBODY: &str = "anonymous";

/// The keys as they are now.
pub(crate) struct Door {
    ring: ArcSwapOption<Ring>,
    file: Option<(PathBuf, Watched)>,
    anybody: Arc<Account>,
}

impl Door {
    /// # Errors
    /// `Config` naming the file and what is wrong with it; no key stands in the text.
    pub(crate) fn new(config: &GatewayConfig) -> Result<Self, GatewayError> {
        let file = config.api_keys_file.clone().map(|file| (file.clone(), Watched::new(vec![file])));
        let door = Self { ring: ArcSwapOption::empty(), file, anybody: Arc::new(Account::new(ANYBODY)) };
        match (&door.file, &config.api_key) {
            (Some(_), Some(_)) => {
                return Err(GatewayError::Config(
                    "api_keys_file and the key of the environment exclude each other".into(),
                ));
            }
            (Some((file, _)), None) => {
                let ring = door.read(file).map_err(GatewayError::Config)?;
                door.ring.store(Some(Arc::new(ring)));
            }
            (None, Some(key)) => {
                let key = key.trim();
                if key.is_empty() || !key.bytes().all(|byte| byte.is_ascii_graphic()) {
                    let why = "the API key of the environment must have visible ASCII characters only, and some";
                    return Err(GatewayError::Config(why.into()));
                }
                door.ring.store(Some(Arc::new(Ring::of_one(OF_THE_ENVIRONMENT, key))));
            }
            (None, None) => {}
        }
        Ok(door)
    }

    /// Whether a key is needed.
    pub(crate) fn is_locked(&self) -> bool {
        self.ring.load().is_some()
    }

    /// Who asks. The key stands in `Authorization: Bearer KEY`, or in `x-api-key`.
    ///
    /// # Errors
    /// 401 without a key, or with one that there is not.
    pub(crate) fn ask(&self, headers: &HeaderMap) -> Result<Client, ApiError> {
        let ring = self.ring.load();
        let Some(ring) = ring.as_ref() else { return Ok(Client::anybody(&self.anybody)) };
        let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
            let (scheme, key) = value.as_bytes().split_at_checked(7)?;
            scheme.eq_ignore_ascii_case(b"bearer ").then_some(key.trim_ascii())
        });
        let key = bearer.or_else(|| headers.get(X_API_KEY).map(|value| value.as_bytes()));
        match key {
            Some(key) if !key.is_empty() => ring.find(key).ok_or_else(|| ApiError::unauthorized(true)),
            _ => Err(ApiError::unauthorized(false)),
        }
    }

    fn read(&self, file: &Path) -> Result<Ring, String> {
        let text = files::read_secret("api_keys_file", file)?;
        let before = self.ring.load();
        Ring::read(&text, before.as_deref()).map_err(|why| format!("api_keys_file {}: {why}", file.display()))
    }

    /// Reads the file again whenever it changes, until it is dropped. What cannot be read is logged, and the keys stay.
    pub(crate) async fn follow(self: Arc<Self>) {
        let Some((file, watched)) = self.file.clone() else { return };
        let reread = move || match self.read(&file) {
            Ok(ring) => {
                tracing::info!(keys = ring.len(), "API keys were read again");
                self.ring.store(Some(Arc::new(ring)));
            }
            Err(error) => tracing::error!(%error, "API keys stay as they were"),
        };
        watched.follow(reread).await;
    }
}
