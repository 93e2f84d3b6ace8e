//! What an instance is told of the kernel at its start.

/// How an instance works with the kernel.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Name of the instance.
    pub instance: String,
    /// The eBPF data path, for pools that need it. Nothing of it is touched before the first one.
    pub ebpf: sandwire_datapath::Settings,
    /// Interfaces that packets may leave by without the host's own stack. Without names: those of the
    /// default routes, as they come and go.
    pub uplinks: Option<Vec<String>>,
}

impl Settings {
    /// The defaults of an instance.
    #[must_use]
    pub fn new(instance: &str) -> Self {
        let folder = sandwire_datapath::folder_for(instance);
        Self {
            instance: instance.to_owned(),
            ebpf: sandwire_datapath::Settings {
                mount: true,
                ..sandwire_datapath::Settings::new(folder)
            },
            uplinks: None,
        }
    }
}
