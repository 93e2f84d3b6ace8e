//! `DEL`: releases the container's lease, and with it its interface and its published ports.
//!
//! Nothing to release is success: after an `ADD` that failed, after another `DEL`, without the container's namespace.
//! Only a daemon that doesn't answer is an error, since it alone knows what is left.

use sandwire_api::error::ErrorCode;

use crate::{environment::Container, error::Error, network::Network};

pub(crate) fn run(network: &Network, container: &Container) -> Result<String, Error> {
    let lease = network.lease(container);
    match network.client().release(&lease, None) {
        Ok(_) => Ok(String::new()),
        Err(error) if error.code() == Some(ErrorCode::NotFound) => Ok(String::new()),
        Err(error) => {
            let operation = format!(
                "delete interface {} of container {} from network {}",
                container.interface,
                container.id,
                network.name()
            );
            Err(Error::of_client(operation, error))
        }
    }
}
