//! Faults put into the programs on purpose. The differential test must see every one of them, or it
//! would not see such a fault made by mistake either.

pub(crate) mod faults;

use std::{
    fs,
    path::{Path, PathBuf},
};

use sandwire_bpf_compiler::Compiler;

/// A fault: a text of a file of `bpf/` replaced by another.
pub(crate) struct Mutant {
    pub(crate) name: &'static str,
    file: &'static str,
    text: &'static str,
    instead: &'static str,
    /// Classes that are likely to see it, tried first.
    pub(crate) classes: &'static [&'static str],
}

const fn mutant(
    name: &'static str,
    file: &'static str,
    text: &'static str,
    instead: &'static str,
    classes: &'static [&'static str],
) -> Mutant {
    Mutant {
        name,
        file,
        text,
        instead,
        classes,
    }
}

/// Stages that only children have.
const OF_CHILDREN: [&str; 1] = ["lib/neighbours.h"];

/// Puts a fault into a copy of the programs and compiles them. Returns the folder of the objects.
///
/// # Errors
/// The text to replace isn't there, or the result doesn't compile: then the fault must be put
/// otherwise.
pub(crate) fn compile(mutant: &Mutant) -> Result<PathBuf, String> {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"))
        .join("mutants")
        .join(mutant.name.replace(' ', "-"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("bpf");
    for sub in ["", "lib"] {
        copy(&source.join(sub), &folder.join(sub)).map_err(|error| error.to_string())?;
    }
    let path = folder.join(mutant.file);
    let text = fs::read_to_string(&path).map_err(|error| format!("{}: {error}", mutant.file))?;
    if !text.contains(mutant.text) {
        return Err(format!("{} doesn't contain {:?}", mutant.file, mutant.text));
    }
    let text = text.replacen(mutant.text, mutant.instead, 1);
    fs::write(&path, text).map_err(|error| error.to_string())?;
    for object in ["from_guest", "to_guest", "child"] {
        // What the fault isn't in is as the build script made it. Of the stages that children share with others, one
        // of them is enough to show a fault.
        let is_of_stages = mutant.file.starts_with("lib/");
        let is_childs = OF_CHILDREN.contains(&mutant.file);
        if mutant.file.starts_with(object) || (is_of_stages && (object == "child") == is_childs) {
            run_clang(&folder, object)?;
        } else {
            let object = format!("{object}.o");
            let built = Path::new(env!("OUT_DIR")).join(&object);
            fs::copy(built, folder.join(&object)).map_err(|error| error.to_string())?;
        }
    }
    Ok(folder)
}

fn copy(from: &Path, to: &Path) -> std::io::Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let path = entry?.path();
        if let (true, Some(name)) = (path.is_file(), path.file_name()) {
            fs::copy(&path, to.join(name))?;
        }
    }
    Ok(())
}

/// As the build script does it, but a fault may leave something unused.
fn run_clang(folder: &Path, object: &str) -> Result<(), String> {
    let headers = format!("-I{}", folder.join("lib").display());
    let source = folder.join(format!("{object}.bpf.c"));
    let object = folder.join(format!("{object}.o"));
    Compiler::find()
        .and_then(|compiler| compiler.compile(&source, &object, &[&headers, "-w"]))
        .map_err(|error| error.to_string())
}
